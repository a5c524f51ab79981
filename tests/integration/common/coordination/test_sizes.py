"""Placeholder sizes in Redis: bounded in number and bytes over all writers; the oldest go first."""

import asyncio
import hashlib
from typing import Any

import pytest

from tests.support.item_records import item_record
from triptych_common.bus import AsyncBus
from triptych_common.coordination import SharedSizes
from triptych_common.coordination import entry_directory as module
from triptych_gateway.encode.sizes import ItemSizes
from triptych_gateway.settings import GatewaySettings

MAX_ITEMS = 1000
SIZES = ItemSizes(num_embeds=16384, record=item_record(16384, (1, 256, 256)))
VALUE = SIZES.model_dump_json().encode()


def mm_hash(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


async def write(sizes: SharedSizes, numbers: range, value: bytes = VALUE) -> None:
    """Many at once, in any order."""
    for start in range(0, len(numbers), 100):
        await asyncio.gather(*(sizes.set(mm_hash(number), value) for number in numbers[start : start + 100]))


def held_bytes(raw: Any, bus: AsyncBus) -> int:
    keys = (bus.names.sizes, bus.names.sizes_order)
    return sum(raw.memory_usage(key, samples=0) or 0 for key in keys)


async def test_what_was_written_is_read(bus: AsyncBus, raw: Any) -> None:
    sizes = SharedSizes(bus, max_items=MAX_ITEMS, ttl_s=60)
    assert await sizes.get(mm_hash(1)) is None
    assert await sizes.set(mm_hash(1), b'{"rows":16}')
    assert await sizes.set(mm_hash(1), b'{"rows":17}')
    assert await sizes.get(mm_hash(1)) == b'{"rows":17}'
    for key in (bus.names.sizes, bus.names.sizes_order):
        assert 50 < raw.ttl(key) <= 60
    assert raw.llen(bus.names.sizes_order) == 1


async def test_more_than_the_bound_from_several_gateways(bus: AsyncBus, redis_url: str, raw: Any) -> None:
    async with await AsyncBus.connect(redis_url, "test", client_name="other") as other:
        gateways = [SharedSizes(each, max_items=MAX_ITEMS, ttl_s=60) for each in (bus, other)]
        await asyncio.gather(
            *(write(each, range(5 * MAX_ITEMS)[n::2]) for n, each in enumerate(gateways)),
        )
    assert raw.hlen(bus.names.sizes) == raw.llen(bus.names.sizes_order) == MAX_ITEMS
    full = held_bytes(raw, bus)
    await write(gateways[0], range(5 * MAX_ITEMS, 8 * MAX_ITEMS))
    assert held_bytes(raw, bus) <= 1.1 * full
    assert len(raw.keys("triptych:test:{sizes}*")) == 2


async def test_the_oldest_go_first(bus: AsyncBus) -> None:
    sizes = SharedSizes(bus, max_items=3, ttl_s=60)
    for number in range(5):
        await sizes.set(mm_hash(number), b"%d" % number)
    assert [await sizes.get(mm_hash(n)) for n in range(5)] == [None, None, b"2", b"3", b"4"]


async def test_the_default_bound_is_some_megabytes(bus: AsyncBus, raw: Any) -> None:
    """Also with values as large as can be."""
    num_items = GatewaySettings().sizes_redis_items
    sizes = SharedSizes(bus, max_items=MAX_ITEMS, ttl_s=60)
    for value, limit_bytes in ((VALUE, 16 << 20), (b"x" * module.MAX_SIZES_BYTES, 160 << 20)):
        raw.delete(bus.names.sizes, bus.names.sizes_order)
        await write(sizes, range(MAX_ITEMS), value)
        per_item = held_bytes(raw, bus) / MAX_ITEMS
        print(f"{len(value)} bytes of sizes cost {per_item:.0f} bytes")
        assert per_item * num_items <= limit_bytes


async def test_a_value_that_is_too_large_is_not_kept(bus: AsyncBus, raw: Any) -> None:
    sizes = SharedSizes(bus, max_items=MAX_ITEMS, ttl_s=60)
    assert not await sizes.set(mm_hash(1), b"x" * (module.MAX_SIZES_BYTES + 1))
    assert raw.dbsize() == 0


async def test_a_lower_bound_is_reached_in_small_steps(bus: AsyncBus, raw: Any) -> None:
    await write(SharedSizes(bus, max_items=MAX_ITEMS, ttl_s=60), range(MAX_ITEMS))
    lower = SharedSizes(bus, max_items=10, ttl_s=60)
    await lower.set(mm_hash(MAX_ITEMS), VALUE)
    assert raw.hlen(bus.names.sizes) == MAX_ITEMS + 1 - module.MAX_DROPPED
    await write(lower, range(2 * MAX_ITEMS, 2 * MAX_ITEMS + 20))
    assert raw.hlen(bus.names.sizes) == raw.llen(bus.names.sizes_order) == 10


@pytest.mark.parametrize("lost", ["sizes", "sizes_order"])
async def test_one_of_the_two_keys_is_deleted(bus: AsyncBus, raw: Any, lost: str) -> None:
    sizes = SharedSizes(bus, max_items=10, ttl_s=60)
    await write(sizes, range(10))
    raw.delete(getattr(bus.names, lost))
    await write(sizes, range(100, 130))
    assert raw.hlen(bus.names.sizes) == raw.llen(bus.names.sizes_order) == 10
    await sizes.set(mm_hash(130), VALUE)
    assert await sizes.get(mm_hash(130)) == VALUE


async def test_keys_of_an_earlier_version_do_not_disturb(bus: AsyncBus, raw: Any) -> None:
    """A key for each item; they expire by themselves."""
    old = f"triptych:test:sizes:{mm_hash(1)}"
    raw.set(old, VALUE, px=60_000)
    sizes = SharedSizes(bus, max_items=10, ttl_s=60)
    assert await sizes.get(mm_hash(1)) is None
    await write(sizes, range(20))
    await sizes.set(mm_hash(20), VALUE)
    assert await sizes.get(mm_hash(20)) == VALUE
    assert raw.get(old) == VALUE
    assert raw.ttl(old) > 0
