"""A call that takes too long is given up, and what its answer brings is given back."""

from concurrent.futures import Future
from typing import Any

import pytest

from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.protocol.store import (
    Cancel,
    Descriptor,
    Done,
    Ping,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    StoreReply,
    TensorSpec,
    Unpin,
    Unwatch,
    Watching,
)
from triptych_vllm_connector.plain.bounded_calls import BoundedCalls

HASH = "ab" * 32
SPEC = TensorSpec(shape=(1, 1), dtype="float32", num_bytes=4)
PIN = PinOrWatch(seq=0, mm_hash=HASH, num_holders=2)
PINNED = Pinned(seq=1, pin_id=7, descriptor=Descriptor(mm_hash=HASH, spec=SPEC, offset=0, generation=1))
RESERVED = Reserved(seq=1, reservation_id=9, offset=0, generation=1)


class SlowSession:
    """Answers nothing by itself."""

    def __init__(self) -> None:
        self.is_connected = True
        self.sent: list[Any] = []
        self.futures: list[Future[StoreReply]] = []

    def submit(self, command: Any) -> "Future[StoreReply]":
        self.sent.append(command)
        self.futures.append(Future())
        return self.futures[-1]


@pytest.fixture
def session() -> Any:
    return SlowSession()


@pytest.fixture
def calls() -> BoundedCalls:
    return BoundedCalls(0.01)


@pytest.mark.parametrize(
    ("command", "answer", "given_back"),
    [
        (PIN, PINNED, [Unpin(seq=0, pin_id=7)] * 2),
        (PIN, Watching(seq=1, mm_hash=HASH, writing=False), [Unwatch(seq=0, mm_hash=HASH)]),
        (Reserve(seq=0, mm_hash=HASH, spec=SPEC), RESERVED, [Cancel(seq=0, reservation_id=9)]),
        (Ping(seq=0), Done(seq=1), []),
    ],
)
def test_a_late_answer_is_given_back(
    session: Any, calls: BoundedCalls, command: Any, answer: StoreReply, given_back: list[Any]
) -> None:
    assert calls.try_call(session, command) is None
    assert calls.is_store_late
    session.futures[0].set_result(answer)
    assert session.sent == [command, *given_back]
    assert not calls.is_store_late


def test_a_store_that_hangs_costs_one_wait(session: Any, calls: BoundedCalls) -> None:
    for _ in range(3):
        assert calls.try_call(session, PIN) is None
    assert session.sent == [PIN]


def test_after_the_late_answer_the_store_is_asked_again(session: Any, calls: BoundedCalls) -> None:
    calls.try_call(session, PIN)
    session.futures[0].set_exception(StoreUnavailableError("over"))
    calls.try_call(session, Ping(seq=0))
    assert session.sent == [PIN, Ping(seq=0)]


def test_a_store_that_is_away_is_not_waited_for(session: Any, calls: BoundedCalls) -> None:
    session.is_connected = False
    assert calls.try_call(session, PIN) is None
    assert not session.sent
