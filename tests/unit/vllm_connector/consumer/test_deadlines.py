"""Deadlines of waiting requests, and the alarm that wakes the engine for them."""

import threading
import time

import pytest

from triptych_vllm_connector.consumer.deadlines import Deadlines
from triptych_vllm_connector.links.alarm import Alarm


@pytest.fixture
def armed() -> list[float]:
    return []


@pytest.fixture
def deadlines(armed: list[float]) -> Deadlines:
    made = Deadlines()
    made.bind(armed.append)
    return made


def test_who_is_overdue_is_named_once_the_longest_first(deadlines: Deadlines) -> None:
    for request_id, when in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
        deadlines.set(request_id, when)
    assert deadlines.take_passed(0.5) == []
    assert deadlines.take_passed(2.0) == ["a", "b"]
    assert deadlines.take_passed(2.0) == []
    assert [deadlines.has(request_id) for request_id in "abc"] == [False, False, True]


def test_a_new_deadline_replaces_the_old_one(deadlines: Deadlines) -> None:
    deadlines.set("a", 1.0)
    deadlines.set("a", 5.0)
    assert deadlines.take_passed(4.0) == []
    assert deadlines.take_passed(5.0) == ["a"]


def test_who_has_ended_is_never_overdue(deadlines: Deadlines) -> None:
    deadlines.set("a", 1.0)
    deadlines.discard("a")
    deadlines.discard("a")
    assert deadlines.take_passed(9.0) == []
    assert len(deadlines) == 0


def test_the_alarm_is_set_for_the_earliest(deadlines: Deadlines, armed: list[float]) -> None:
    deadlines.set("b", 5.0)
    deadlines.set("c", 9.0)
    deadlines.set("a", 3.0)
    assert armed == [5.0, 3.0]
    deadlines.take_passed(3.0)
    assert armed == [5.0, 3.0, 5.0]


def test_an_alarm_for_nobody_is_set_again(deadlines: Deadlines, armed: list[float]) -> None:
    """The one that it was set for has ended: the next one must not be forgotten."""
    deadlines.set("a", 1.0)
    deadlines.set("b", 5.0)
    deadlines.discard("a")
    assert deadlines.take_passed(1.0) == []
    assert armed == [1.0, 5.0]
    assert deadlines.take_passed(5.0) == ["b"]
    deadlines.set("c", 7.0)
    assert armed == [1.0, 5.0, 7.0]


def test_a_deadline_that_is_set_between_the_alarm_and_the_look(
    deadlines: Deadlines, armed: list[float]
) -> None:
    deadlines.set("a", 1.0)
    deadlines.discard("a")
    deadlines.set("b", 61.0)  # the alarm has just rung, or is about to
    deadlines.take_passed(1.1)
    assert armed == [1.0, 61.0]


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


def test_a_closed_alarm_is_silent() -> None:
    rung = threading.Event()
    alarm = Alarm(rung.set)
    alarm.set(time.monotonic() + 30)
    alarm.close()
    alarm.set(time.monotonic() - 1)
    assert not rung.is_set()
