"""The encoder's end of the store, over a fake session."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.fake_engine import mm_hash, pinned, sealed, watching, writer_lost
from triptych_common.domain.errors import StoreError, StoreFullError, StoreProtocolError
from triptych_common.protocol.store import (
    AlreadySealed,
    Cancel,
    Done,
    PinOrWatch,
    Reserve,
    Reserved,
    TensorSpec,
    Unpin,
    Unwatch,
)
from triptych_encoder.store import store_client as module
from triptych_encoder.store.store_client import StoreClient

A = mm_hash("a")
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
        takes_answer = isinstance(command, Reserve | PinOrWatch) and self.answers
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
def hand_over(session: FakeStoreSession, monkeypatch: pytest.MonkeyPatch) -> StoreClient:
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.001)
    made = StoreClient("encoder-0")
    made._session = session  # type: ignore[assignment]
    return made


async def reserve(
    hand_over: StoreClient, is_granted: Callable[[], bool] = lambda: False, timeout_s: float = 5.0
) -> tuple[Reserved | AlreadySealed, int]:
    """The answer, and how often it was told that the store is full."""
    num_full = 0

    async def on_full() -> None:
        nonlocal num_full
        num_full += 1

    return await hand_over.reserve(A, SPEC, is_granted, on_full, timeout_s), num_full


async def test_the_worker_is_the_writer_of_what_the_host_reserves(
    session: FakeStoreSession, hand_over: StoreClient
) -> None:
    session.answers = [RESERVED]
    assert await reserve(hand_over) == (RESERVED, 0)
    (command,) = session.commands
    assert isinstance(command, Reserve)
    assert (command.writer, command.may_use_reserve) == ("encoder-0/worker-0", False)


async def test_a_full_store_is_asked_again_and_a_grant_that_came_meanwhile_counts(
    session: FakeStoreSession, hand_over: StoreClient
) -> None:
    session.answers = [StoreFullError("full", ""), StoreFullError("full", ""), RESERVED]
    granted = iter([False, False, True])
    assert await reserve(hand_over, lambda: next(granted)) == (RESERVED, 2)
    assert [command.may_use_reserve for command in session.commands] == [False, False, True]


async def test_a_full_store_is_not_asked_for_ever(session: FakeStoreSession, hand_over: StoreClient) -> None:
    session.answers = [StoreFullError("full", "")] * 1000
    with pytest.raises(StoreFullError):
        await reserve(hand_over, timeout_s=0.05)


@pytest.mark.parametrize("answer", [RESERVED, pinned(A, 7)])
async def test_a_store_that_comes_back_in_time_has_cost_only_time(
    session: FakeStoreSession, hand_over: StoreClient, answer: Any
) -> None:
    """A restart that checks a large region takes its time; commands are answered after it."""
    session.answers = ["late"]
    asked = reserve(hand_over) if answer is RESERVED else hand_over.watch(A, 5.0)
    task = asyncio.get_running_loop().create_task(asked)
    assert not (await asyncio.wait({task}, timeout=0.05))[0]
    (future,) = session.unanswered
    future.set_result(answer)
    await task
    assert len(session.commands) == 1


async def test_other_refusals_are_final(session: FakeStoreSession, hand_over: StoreClient) -> None:
    session.answers = [StoreError("internal", "")]
    with pytest.raises(StoreError):
        await reserve(hand_over)
    session.answers = [Done(seq=1)]
    with pytest.raises(StoreProtocolError, match="reserve"):
        await reserve(hand_over)


async def test_a_sealed_entry_is_pinned_at_once(session: FakeStoreSession, hand_over: StoreClient) -> None:
    session.answers = [pinned(A, 7)]
    assert (await hand_over.watch(A, 5.0)).result() == 7


async def test_the_pin_comes_with_the_seal(session: FakeStoreSession, hand_over: StoreClient) -> None:
    session.answers = [watching(A)]
    future = await hand_over.watch(A, 5.0)
    assert not future.done()
    hand_over._on_push(sealed(A, 7))
    assert future.result() == 7


async def test_the_seal_may_come_before_the_answer(session: FakeStoreSession, hand_over: StoreClient) -> None:
    class Early(FakeStoreSession):
        def submit(self, command: Any) -> "asyncio.Future[Any]":
            hand_over._on_push(sealed(A, 7))
            self.answers = [watching(A)]
            return super().submit(command)

    hand_over._session = Early()  # type: ignore[assignment]
    assert (await hand_over.watch(A, 5.0)).result() == 7


async def test_a_lost_writer_ends_the_wait(session: FakeStoreSession, hand_over: StoreClient) -> None:
    session.answers = [watching(A)]
    future = await hand_over.watch(A, 5.0)
    hand_over._on_push(writer_lost(A))
    with pytest.raises(StoreError, match="writer"):
        future.result()
    hand_over._on_push(writer_lost(A))  # nobody waits any more


async def test_pins_that_nobody_waits_for_are_given_back(
    session: FakeStoreSession, hand_over: StoreClient
) -> None:
    session.answers = [watching(A)]
    future = await hand_over.watch(A, 5.0)
    hand_over._on_push(sealed(A, 7))
    hand_over._on_push(sealed(A, 8))
    hand_over.give_up(A, 5)
    hand_over._on_push(sealed(A, 9))
    assert future.result() == 7
    assert [type(command) for command in session.commands] == [PinOrWatch, Unpin, Unwatch, Cancel, Unpin]


async def test_two_watches_share_their_future(session: FakeStoreSession, hand_over: StoreClient) -> None:
    session.answers = [watching(A), watching(A)]
    assert await hand_over.watch(A, 5.0) is await hand_over.watch(A, 5.0)


async def test_an_odd_answer_to_a_watch(session: FakeStoreSession, hand_over: StoreClient) -> None:
    session.answers = [Done(seq=1)]
    with pytest.raises(StoreProtocolError, match="pin_or_watch"):
        await hand_over.watch(A, 5.0)


async def test_giving_up_never_raises(session: FakeStoreSession, hand_over: StoreClient) -> None:
    session.is_gone = True
    hand_over.give_up(A, 5)
    await asyncio.sleep(0)
    assert [type(command) for command in session.commands] == [Unwatch, Cancel]


async def test_what_is_given_up_is_free_at_once(session: FakeStoreSession, hand_over: StoreClient) -> None:
    hand_over.give_up(A, 5)
    assert session.commands[-1].is_unwritten


@pytest.mark.parametrize("answer", [RESERVED, pinned(A, 7)])
async def test_an_answer_that_comes_too_late_is_undone(
    session: FakeStoreSession, hand_over: StoreClient, answer: Any
) -> None:
    session.answers = ["late"]
    with pytest.raises(StoreError, match="timeout"):
        await (reserve(hand_over, timeout_s=0.001) if answer is RESERVED else hand_over.watch(A, 0.001))
    (future,) = session.unanswered
    future.set_result(answer)
    await asyncio.sleep(0)
    assert isinstance(session.commands[-1], Cancel if answer is RESERVED else Unpin)
