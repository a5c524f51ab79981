"""The encoder's end of the store, over a fake session."""

import asyncio
from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import mm_hash, pinned, sealed, watching, writer_lost
from triptych_common.domain.errors import StoreError, StoreFullError, StoreProtocolError
from triptych_common.protocol.store import (
    AlreadySealed,
    Cancel,
    Done,
    Entries,
    EntryInfo,
    Lookup,
    PinOrWatch,
    Reserve,
    Reserved,
    SlabInfo,
    TensorSpec,
    Unpin,
    Unwatch,
    Welcome,
)
from triptych_common.region.layout import RegionLayout
from triptych_encoder.store.store_client import StoreClient

A = mm_hash("a")
SLAB = "cuda:GPU-" + "0" * 8 + "-0000-0000-0000-" + "0" * 12
SPEC = TensorSpec(shape=(1, 4), dtype="float32", num_bytes=16)
RESERVED = Reserved(seq=1, reservation_id=5, offset=0, generation=1)


class FakeStoreSession:
    """Answers reservations and watches from a list, all else with Done; keeps the commands."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.commands: list[Any] = []
        self.is_gone = False
        self.unanswered: list[asyncio.Future[Any]] = []

    def submit(self, command: Any) -> "asyncio.Future[Any]":
        self.commands.append(command)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        takes_answer = isinstance(command, Reserve | PinOrWatch | Lookup) and self.answers
        answer = self.answers.pop(0) if takes_answer else Done(seq=1)
        if self.is_gone:
            future.set_exception(StoreError("unavailable", "gone"))
        elif answer == "late":
            self.unanswered.append(future)
        elif isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return future


@pytest.fixture
def session() -> FakeStoreSession:
    return FakeStoreSession()


@pytest.fixture
def store_client(session: FakeStoreSession) -> StoreClient:
    return StoreClient("encoder-0", session, asyncio.Event())


async def reserve(
    store_client: StoreClient, *, may_use_reserve: bool = False, timeout_s: float = 5.0
) -> Reserved | AlreadySealed:
    return await store_client.reserve_blocks(
        A, SPEC, may_use_reserve=may_use_reserve, memories=["shm"], timeout_s=timeout_s
    )


async def test_the_worker_is_the_writer_of_what_the_host_reserves(
    session: FakeStoreSession, store_client: StoreClient
) -> None:
    session.answers = [RESERVED]
    assert await reserve(store_client) == RESERVED
    (command,) = session.commands
    assert isinstance(command, Reserve)
    assert (command.writer, command.may_use_reserve) == ("encoder-0/worker-0", False)


@pytest.mark.parametrize("is_granted", [False, True])
async def test_a_full_store_is_reported_and_a_granted_item_may_use_its_reserve(
    session: FakeStoreSession, store_client: StoreClient, is_granted: bool
) -> None:
    session.answers = [StoreFullError("full", "")]
    with pytest.raises(StoreFullError):
        await reserve(store_client, may_use_reserve=is_granted)
    assert [command.may_use_reserve for command in session.commands] == [is_granted]


@pytest.mark.parametrize("answer", [RESERVED, pinned(A, 7)])
async def test_a_store_that_comes_back_in_time_has_cost_only_time(
    session: FakeStoreSession, store_client: StoreClient, answer: Any
) -> None:
    """A restart that checks a large region takes its time; commands are answered after it."""
    session.answers = ["late"]
    asked = reserve(store_client) if answer is RESERVED else store_client.watch_item(A, 5.0)
    task = asyncio.get_running_loop().create_task(asked)
    assert not (await asyncio.wait({task}, timeout=0.05))[0]
    (future,) = session.unanswered
    future.set_result(answer)
    await task
    assert len(session.commands) == 1


async def test_other_refusals_are_final(session: FakeStoreSession, store_client: StoreClient) -> None:
    session.answers = [StoreError("internal", "")]
    with pytest.raises(StoreError):
        await reserve(store_client)
    session.answers = [Done(seq=1)]
    with pytest.raises(StoreProtocolError, match="reserve"):
        await reserve(store_client)


async def test_the_seal_may_come_before_the_answer(
    session: FakeStoreSession, store_client: StoreClient
) -> None:
    class Early(FakeStoreSession):
        def submit(self, command: Any) -> "asyncio.Future[Any]":
            store_client.on_push(sealed(A, 7))
            self.answers = [watching(A)]
            return super().submit(command)

    store_client._session = Early()  # type: ignore[assignment]
    assert (await store_client.watch_item(A, 5.0)).result() == 7


async def test_a_lost_writer_ends_the_wait(session: FakeStoreSession, store_client: StoreClient) -> None:
    session.answers = [watching(A)]
    future = await store_client.watch_item(A, 5.0)
    store_client.on_push(writer_lost(A))
    with pytest.raises(StoreError, match="writer"):
        future.result()
    store_client.on_push(writer_lost(A))  # no job waits any more


async def test_two_watches_share_their_future(session: FakeStoreSession, store_client: StoreClient) -> None:
    session.answers = [watching(A), watching(A)]
    assert await store_client.watch_item(A, 5.0) is await store_client.watch_item(A, 5.0)


async def test_an_odd_answer_to_a_watch(session: FakeStoreSession, store_client: StoreClient) -> None:
    session.answers = [Done(seq=1)]
    with pytest.raises(StoreProtocolError, match="pin_or_watch"):
        await store_client.watch_item(A, 5.0)


async def test_giving_up_never_raises(session: FakeStoreSession, store_client: StoreClient) -> None:
    session.is_gone = True
    store_client.unwatch_item(A, 5)
    await asyncio.sleep(0)
    assert [type(command) for command in session.commands] == [Unwatch, Cancel]


async def test_what_is_given_up_is_free_at_once(session: FakeStoreSession, store_client: StoreClient) -> None:
    store_client.unwatch_item(A, 5)
    assert session.commands[-1].is_unwritten


@pytest.mark.parametrize("answer", [RESERVED, pinned(A, 7)])
async def test_an_answer_that_comes_too_late_is_undone(
    session: FakeStoreSession, store_client: StoreClient, answer: Any
) -> None:
    session.answers = ["late"]
    with pytest.raises(StoreError, match="timeout"):
        await (
            reserve(store_client, timeout_s=0.001)
            if answer is RESERVED
            else store_client.watch_item(A, 0.001)
        )
    (future,) = session.unanswered
    future.set_result(answer)
    await asyncio.sleep(0)
    assert isinstance(session.commands[-1], Cancel if answer is RESERVED else Unpin)


@pytest.mark.parametrize("answer", [RESERVED, pinned(A, 7)])
async def test_an_answer_that_comes_with_the_cancellation_is_undone(
    session: FakeStoreSession, store_client: StoreClient, answer: Any
) -> None:
    session.answers = ["late"]
    asked = reserve(store_client) if answer is RESERVED else store_client.watch_item(A, 5.0)
    task = asyncio.get_running_loop().create_task(asked)
    await asyncio.sleep(0)
    (future,) = session.unanswered
    future.set_result(answer)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert isinstance(session.commands[-1], Cancel if answer is RESERVED else Unpin)


async def test_only_what_is_complete_counts_as_sealed(
    session: FakeStoreSession, store_client: StoreClient
) -> None:
    hashes = [mm_hash(each) for each in "abcd"]
    entries = (
        EntryInfo(mm_hash=hashes[0], state="absent"),
        EntryInfo(mm_hash=hashes[1], state="writing"),
        EntryInfo(mm_hash=hashes[2], state="ready"),
        EntryInfo(mm_hash=hashes[3], state="pinned"),
    )
    session.answers = [Entries(seq=1, entries=entries)]
    assert await store_client.find_sealed(hashes, 5.0) == set(hashes[2:])
    with pytest.raises(StoreProtocolError):
        await store_client.find_sealed(hashes, 5.0)


def test_tensors_fit_together_by_whole_blocks_of_their_memories() -> None:
    session: Any = FakeStoreSession()
    session.welcome = Welcome(
        seq=1,
        store="store-0",
        generation=1,
        region_path="/region",
        region_num_bytes=RegionLayout(4096, num_blocks=10, num_pin_records=1024).num_bytes,
        block_num_bytes=4096,
        slab=SlabInfo(memory=SLAB, num_bytes=3 * 4096, ipc_handle="0" * 128),
    )
    store_client = StoreClient("encoder-0", session, asyncio.Event())
    for memories, num_blocks in ((["shm"], 10), (["redis"], 10), ([SLAB], 3), ([SLAB, "shm"], 13)):
        assert store_client.can_hold([4096 - 1] * num_blocks, memories)
        assert not store_client.can_hold([1] * (num_blocks + 1), memories)
        assert not store_client.can_hold([4096 + 1] * (num_blocks // 2) + [4096] * 2, memories)
