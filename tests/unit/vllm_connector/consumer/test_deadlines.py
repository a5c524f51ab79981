"""Deadlines of waiting requests, and the alarm that wakes the engine for them."""

import threading
import time

import pytest

from triptych_vllm_connector.consumer.deadlines import GRACE_S, Deadlines
from triptych_vllm_connector.links.opening import Alarm


@pytest.fixture
def armed() -> list[float]:
    return []


class PlayedDeadlines(Deadlines):
    """With a clock that the test moves."""

    def __init__(self, armed: list[float]) -> None:
        super().__init__(lambda: self.now_s, armed.append)
        self.now_s = 0.0

    def set_until(self, engine_request_id: str, when: float) -> None:
        self.start_wait(engine_request_id, when - self.now_s - GRACE_S)

    def take_at(self, now_s: float) -> list[str]:
        self.now_s = now_s
        return self.take_passed()


@pytest.fixture
def deadlines(armed: list[float]) -> PlayedDeadlines:
    return PlayedDeadlines(armed)


def test_overdue_requests_are_named_once_the_longest_first(deadlines: PlayedDeadlines) -> None:
    for request_id, when in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
        deadlines.set_until(request_id, when)
    assert deadlines.take_at(0.5) == []
    assert deadlines.take_at(2.0) == ["a", "b"]
    assert deadlines.take_at(2.0) == []
    assert [deadlines.has_deadline(request_id) for request_id in "abc"] == [False, False, True]


def test_a_new_deadline_replaces_the_old_one(deadlines: PlayedDeadlines) -> None:
    deadlines.set_until("a", 1.0)
    deadlines.set_until("a", 5.0)
    assert deadlines.take_at(4.0) == []
    assert deadlines.take_at(5.0) == ["a"]


def test_the_alarm_is_set_for_the_earliest(deadlines: PlayedDeadlines, armed: list[float]) -> None:
    deadlines.set_until("b", 5.0)
    deadlines.set_until("c", 9.0)
    deadlines.set_until("a", 3.0)
    assert armed == [5.0, 3.0]
    deadlines.take_at(3.0)
    assert armed == [5.0, 3.0, 5.0]


def test_an_alarm_without_a_request_is_set_again(deadlines: PlayedDeadlines, armed: list[float]) -> None:
    """The one that it was set for has ended: the next one must not be forgotten."""
    deadlines.set_until("a", 1.0)
    deadlines.set_until("b", 5.0)
    deadlines.end_wait("a")
    assert deadlines.take_at(1.0) == []
    assert armed == [1.0, 5.0]
    assert deadlines.take_at(5.0) == ["b"]
    deadlines.set_until("c", 7.0)
    assert armed == [1.0, 5.0, 7.0]


def test_the_alarm_rings_at_the_earliest_time_and_once() -> None:
    rang_at: list[float] = []
    rung = threading.Semaphore(0)

    def ring() -> None:
        rang_at.append(time.monotonic())
        rung.release()

    alarm = Alarm(ring)
    now = time.monotonic()
    alarm.set(now + 30)
    alarm.set(now + 0.05)
    alarm.set(now + 20)
    assert rung.acquire(timeout=10)
    assert rang_at[0] >= now + 0.05
    alarm.set(time.monotonic() - 1)  # the past
    assert rung.acquire(timeout=10)
    alarm.close()
    assert not rung.acquire(blocking=False)


def test_a_closed_alarm_calls_no_more() -> None:
    rung = threading.Event()
    alarm = Alarm(rung.set)
    alarm.set(time.monotonic() + 30)
    alarm.close()
    alarm.set(time.monotonic() - 1)
    assert not rung.is_set()
