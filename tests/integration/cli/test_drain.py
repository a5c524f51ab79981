"""What `drain` does where agents are away for a moment, or for good: nothing is thrown away in silence. On a
real Redis; store and mover are stand-ins.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from triptych_cli.commands import clients, drain
from triptych_cli.commands.hosts.mover import Move, MoveResults
from triptych_cli.supervisor.state import HostStatus
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import FabricEndpoint, FabricLoad, InstanceRecord, Role
from triptych_common.protocol.store import Entries, EntryInfo, ListEntries, TensorSpec

HOST = HostStatus(name="a", store="store-a", agent="fabric-a", join_dir="", key_file=None, runs_redis=False)
SPEC = TensorSpec(shape=(4, 4), dtype="float32", num_bytes=64)
HASHES = tuple(f"{number:064x}" for number in range(3))


class StandInStore:
    """Has `HASHES`, of which the last one was used last."""

    def __init__(self) -> None:
        self.num_pages = 0

    async def request(self, command: Any) -> Any:
        assert isinstance(command, ListEntries)
        self.num_pages += 1
        infos = (
            EntryInfo(mm_hash=each, state="ready", spec=SPEC, age_s=float(len(HASHES) - number))
            for number, each in enumerate(HASHES)
            if command.after is None or each > command.after
        )
        return Entries(seq=1, entries=tuple(itertools.islice(infos, command.limit)))


class StandInMover:
    """Moves whatever it is told to."""

    def __init__(self, *_: Any) -> None:
        self.results = MoveResults()

    async def move(self, moves: Sequence[Move], deadline: float) -> None:
        self.results.moved.update({each.mm_hash: each.target for each in moves})
        self.results.num_moved = len(moves)


@pytest.fixture
async def bus(redis_url: str) -> AsyncIterator[AsyncBus]:
    async with await AsyncBus.connect(redis_url, "test", client_name="tests") as bus:
        yield bus


@pytest.fixture
def store(bus: AsyncBus, monkeypatch: pytest.MonkeyPatch) -> StandInStore:
    store = StandInStore()

    @asynccontextmanager
    async def given(what: Any) -> AsyncIterator[Any]:
        yield what

    monkeypatch.setattr(drain, "store_session", lambda: given(store))
    monkeypatch.setattr(drain, "message_bus", lambda: given(bus))
    monkeypatch.setattr(drain, "Mover", StandInMover)
    monkeypatch.setattr(drain, "ASK_AGAIN_S", 0.01)
    return store


def agent(name: str, *, free: int | None = 1000) -> InstanceRecord:
    load = None if free is None else FabricLoad(num_entries=0, entries_num_bytes=0, free_num_bytes=free)
    return InstanceRecord(
        instance=f"fabric-{name}", boot_id="b", role=Role.FABRIC, store=f"store-{name}", fabric_load=load,
        fabric=FabricEndpoint(host="192.0.2.1", port=7420, generation=1),
    )  # fmt: skip


async def moved(within_s: float) -> MoveResults:
    return await drain._moved(HOST, time.monotonic() + within_s, {})


async def test_without_the_hosts_agent_all_entries_are_failures(bus: AsyncBus, store: StandInStore) -> None:
    await Registry(bus).register(agent("b"), ttl_s=60.0)
    results = await moved(0.05)
    assert results.failures == dict.fromkeys(HASHES, "the agent of this host is not registered")
    assert drain._left_behind(results, results) is not None


async def test_where_no_target_tells_its_room_all_entries_are_failures(
    bus: AsyncBus, store: StandInStore
) -> None:
    for each in (agent("a"), agent("b", free=None)):
        await Registry(bus).register(each, ttl_s=60.0)
    results = await moved(0.05)
    assert results.failures == dict.fromkeys(HASHES, "no word from the agent of store-b")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([agent("b")], agent("a")),  # the host's own agent is started again
        ([agent("a"), agent("b", free=None)], agent("b")),  # the target's has not asked its store yet
    ],
)
async def test_agents_are_waited_for(
    bus: AsyncBus, store: StandInStore, before: list[InstanceRecord], after: InstanceRecord
) -> None:
    for each in before:
        await Registry(bus).register(each, ttl_s=60.0)
    async with asyncio.TaskGroup() as group:
        moving = group.create_task(moved(60.0))
        done, _ = await asyncio.wait({moving}, timeout=0.1)
        assert not done
        await Registry(bus).register(after, ttl_s=60.0)
    results = moving.result()
    assert results.moved == dict.fromkeys(HASHES, "store-b")
    assert drain._left_behind(results, MoveResults()) is None


async def test_what_fits_nowhere_is_no_failure(bus: AsyncBus, store: StandInStore) -> None:
    for each in (agent("a"), agent("b", free=0)):
        await Registry(bus).register(each, ttl_s=60.0)
    results = await moved(60.0)
    assert (results.moved, results.failures) == ({}, {})


async def test_entries_of_all_pages_go_those_first_that_were_used_last(
    bus: AsyncBus, store: StandInStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (agent("a"), agent("b")):
        await Registry(bus).register(each, ttl_s=60.0)
    monkeypatch.setattr(clients, "MAX_LISTED", 2)
    results = await moved(60.0)
    assert list(results.moved) == list(reversed(HASHES))
    assert store.num_pages == 2
