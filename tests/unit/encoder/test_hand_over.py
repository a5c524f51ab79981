"""The encoder's end of the store, over a fake session."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.fake_engine import mm_hash, pinned, sealed, watching, writer_lost

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
from triptych_encoder import hand_over as module
from triptych_encoder.hand_over import HandOver

A = mm_hash("a")
SPEC = TensorSpec(shape=(1, 4), dtype="float32", num_bytes=16)
RESERVED = Reserved(seq=1, reservation_id=5, offset=0, generation=1)


class FakeStoreSession:
    """Answers from a list, one per request; keeps the commands."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.commands: list[Any] = []

    async def request(self, command: Any, timeout_s: float = 10.0) -> Any:
        self.commands.append(command)
        answer = self.answers.pop(0) if self.answers else Done(seq=1)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def submit(self, command: Any) -> None:
        self.commands.append(command)


@pytest.fixture
def session() -> FakeStoreSession:
    return FakeStoreSession()


@pytest.fixture
def hand_over(session: FakeStoreSession, monkeypatch: pytest.MonkeyPatch) -> HandOver:
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.001)
    made = HandOver("encoder-0")
    made._session = session  # type: ignore[assignment]
    return made


async def reserve(
    hand_over: HandOver, is_granted: Callable[[], bool] = lambda: False, timeout_s: float = 5.0
) -> tuple[Reserved | AlreadySealed, int]:
    """The answer, and how often it was told that the store is full."""
    num_full = 0

    async def on_full() -> None:
        nonlocal num_full
        num_full += 1

    return await hand_over.reserve(A, SPEC, is_granted, on_full, timeout_s), num_full


async def test_the_worker_is_the_writer_of_what_the_host_reserves(
    session: FakeStoreSession, hand_over: HandOver
) -> None:
    session.answers = [RESERVED]
    assert await reserve(hand_over) == (RESERVED, 0)
    (command,) = session.commands
    assert isinstance(command, Reserve)
    assert (command.writer, command.may_use_reserve) == ("encoder-0/worker-0", False)


async def test_a_full_store_is_asked_again_and_a_grant_that_came_meanwhile_counts(
    session: FakeStoreSession, hand_over: HandOver
) -> None:
    session.answers = [StoreFullError("full", ""), StoreFullError("full", ""), RESERVED]
    granted = iter([False, False, True])
    assert await reserve(hand_over, lambda: next(granted)) == (RESERVED, 2)
    assert [command.may_use_reserve for command in session.commands] == [False, False, True]


async def test_a_full_store_is_not_asked_for_ever(session: FakeStoreSession, hand_over: HandOver) -> None:
    session.answers = [StoreFullError("full", "")] * 1000
    with pytest.raises(StoreFullError):
        await reserve(hand_over, timeout_s=0.05)


async def test_other_refusals_are_final(session: FakeStoreSession, hand_over: HandOver) -> None:
    session.answers = [StoreError("internal", "")]
    with pytest.raises(StoreError):
        await reserve(hand_over)
    session.answers = [Done(seq=1)]
    with pytest.raises(StoreProtocolError, match="reserve"):
        await reserve(hand_over)


async def test_a_sealed_entry_is_pinned_at_once(session: FakeStoreSession, hand_over: HandOver) -> None:
    session.answers = [pinned(A, 7)]
    assert (await hand_over.watch(A)).result() == 7


async def test_the_pin_comes_with_the_seal(session: FakeStoreSession, hand_over: HandOver) -> None:
    session.answers = [watching(A)]
    future = await hand_over.watch(A)
    assert not future.done()
    hand_over._on_push(sealed(A, 7))
    assert future.result() == 7


async def test_the_seal_may_come_before_the_answer(session: FakeStoreSession, hand_over: HandOver) -> None:
    class Early(FakeStoreSession):
        async def request(self, command: Any, timeout_s: float = 10.0) -> Any:
            hand_over._on_push(sealed(A, 7))
            return watching(A)

    hand_over._session = Early()  # type: ignore[assignment]
    assert (await hand_over.watch(A)).result() == 7


async def test_a_lost_writer_ends_the_wait(session: FakeStoreSession, hand_over: HandOver) -> None:
    session.answers = [watching(A)]
    future = await hand_over.watch(A)
    hand_over._on_push(writer_lost(A))
    with pytest.raises(StoreError, match="writer"):
        future.result()
    hand_over._on_push(writer_lost(A))  # nobody waits any more


async def test_pins_that_nobody_waits_for_are_given_back(
    session: FakeStoreSession, hand_over: HandOver
) -> None:
    session.answers = [watching(A)]
    future = await hand_over.watch(A)
    hand_over._on_push(sealed(A, 7))
    hand_over._on_push(sealed(A, 8))
    await hand_over.give_up(A, 5)
    hand_over._on_push(sealed(A, 9))
    assert future.result() == 7
    assert [type(command) for command in session.commands] == [PinOrWatch, Unpin, Unwatch, Cancel, Unpin]


async def test_two_watches_share_their_future(session: FakeStoreSession, hand_over: HandOver) -> None:
    session.answers = [watching(A), watching(A)]
    assert await hand_over.watch(A) is await hand_over.watch(A)


async def test_an_odd_answer_to_a_watch(session: FakeStoreSession, hand_over: HandOver) -> None:
    session.answers = [Done(seq=1)]
    with pytest.raises(StoreProtocolError, match="pin_or_watch"):
        await hand_over.watch(A)


async def test_giving_up_never_raises(session: FakeStoreSession, hand_over: HandOver) -> None:
    session.answers = [StoreError("unavailable", "gone")]
    await asyncio.wait_for(hand_over.give_up(A, 5), 1)
