"""The directory of entries in Redis: a store once per entry, bounded, and one round trip for all."""

import hashlib
from typing import Any

import pytest

from triptych_common.bus import AsyncBus
from triptych_common.coordination import EntryDirectory, NotedPlace
from triptych_common.coordination.entry_directory import MAX_PLACES
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.transfers import EntryPlace


@pytest.fixture
def directory(bus: AsyncBus) -> EntryDirectory:
    return EntryDirectory(bus, max_items=100, ttl_s=60)


def mm_hash(number: int) -> MmHash:
    return MmHash(hashlib.sha256(str(number).encode()).hexdigest())


def at(store: str, generation: int = 1, num_bytes: int = 100) -> EntryPlace:
    return EntryPlace(store=store, generation=generation, num_bytes=num_bytes)


async def test_places_are_found_the_latest_first(directory: EntryDirectory) -> None:
    one, other, unknown = mm_hash(1), mm_hash(2), mm_hash(3)
    await directory.add([NotedPlace(one, at("store-a")), NotedPlace(other, at("store-a", 2, 7))])
    await directory.add([NotedPlace(one, at("store-b"))])
    found = await directory.find([one, unknown, other])
    assert found == {one: (at("store-b"), at("store-a")), other: (at("store-a", 2, 7),)}
    assert await directory.find([]) == {}


async def test_a_store_stands_there_once_with_its_latest_life(directory: EntryDirectory) -> None:
    for generation in (1, 2, 2):
        await directory.add([NotedPlace(mm_hash(1), at("store-a", generation))])
    await directory.add([NotedPlace(mm_hash(1), at("store-ab"))])  # no name is taken for another
    assert await directory.find([mm_hash(1)]) == {mm_hash(1): (at("store-ab"), at("store-a", 2))}


async def test_an_entry_has_so_many_places(directory: EntryDirectory) -> None:
    await directory.add([NotedPlace(mm_hash(1), at(f"store-{n}")) for n in range(MAX_PLACES + 3)])
    found = (await directory.find([mm_hash(1)]))[mm_hash(1)]
    assert [each.store for each in found] == [f"store-{n}" for n in reversed(range(3, MAX_PLACES + 3))]


async def test_a_place_is_removed_of_that_life_alone(directory: EntryDirectory) -> None:
    await directory.add([NotedPlace(mm_hash(1), at("store-a", 2)), NotedPlace(mm_hash(1), at("store-b"))])
    await directory.remove([NotedPlace(mm_hash(1), at("store-a", 1)), NotedPlace(mm_hash(9), at("store-a"))])
    assert len((await directory.find([mm_hash(1)]))[mm_hash(1)]) == 2
    await directory.remove([NotedPlace(mm_hash(1), at("store-a", 2))])
    assert await directory.find([mm_hash(1)]) == {mm_hash(1): (at("store-b"),)}
    await directory.remove([NotedPlace(mm_hash(1), at("store-b"))])
    assert await directory.find([mm_hash(1)]) == {}


async def test_the_oldest_entries_go_first(bus: AsyncBus, raw: Any) -> None:
    directory = EntryDirectory(bus, max_items=3, ttl_s=60)
    for number in range(5):
        await directory.add([NotedPlace(mm_hash(number), at("store-a"))])
    await directory.remove([NotedPlace(mm_hash(4), at("store-a"))])  # its field stays, and is counted
    await directory.add([NotedPlace(mm_hash(5), at("store-a"))])
    found = await directory.find([mm_hash(number) for number in range(6)])
    assert list(found) == [mm_hash(3), mm_hash(5)]
    assert raw.hlen(bus.names.entries) == raw.llen(bus.names.entries_order) == 3
    for key in (bus.names.entries, bus.names.entries_order):
        assert 50 < raw.ttl(key) <= 60


async def test_what_cannot_be_read_is_no_place(directory: EntryDirectory, bus: AsyncBus, raw: Any) -> None:
    value = b"store-a 1 100\nstore b 1 1 1\nstore-c 0 1\nstore-d x 1\n\n\xff 1 1"
    raw.hset(bus.names.entries, bytes.fromhex(mm_hash(1)), value)
    assert await directory.find([mm_hash(1)]) == {mm_hash(1): (at("store-a"),)}


async def test_all_items_of_a_request_are_one_round_trip(directory: EntryDirectory, raw: Any) -> None:
    """One pipeline: as many reads of the socket for many entries as for one."""

    async def num_reads(num_entries: int) -> int:
        before = raw.info("stats")["total_reads_processed"]
        await directory.find([mm_hash(number) for number in range(num_entries)])
        return int(raw.info("stats")["total_reads_processed"]) - before

    await num_reads(1)  # its connection is made
    assert await num_reads(16) == await num_reads(1)
