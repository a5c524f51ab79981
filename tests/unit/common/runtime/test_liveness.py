"""What counts as hung: no answer, and no progress."""

import os
import signal
import subprocess
import sys

import pytest

from triptych_common.runtime.liveness import (
    CHECK_INTERVAL_S,
    HUNG_AFTER_CHECKS,
    STILL_S,
    Activity,
    HangCount,
    StartLimit,
    activity_of,
)

IDLE = Activity(1.0, frozenset("S"))


def checked(*checks: tuple[bool | None, Activity]) -> HangCount:
    count = HangCount(IDLE)
    for answers, activity in checks:
        count.count(answers, activity, 5.0)
    return count


def test_a_process_without_answers_and_progress_hangs_after_so_many_checks() -> None:
    assert not checked(*[(False, IDLE)] * (HUNG_AFTER_CHECKS - 1)).is_hung
    assert checked(*[(False, IDLE)] * HUNG_AFTER_CHECKS).is_hung


@pytest.mark.parametrize(
    "state", ["R", "D", "t"], ids=["waits for a core", "waits for a disk", "is debugged"]
)
def test_a_slow_process_never_hangs(state: str) -> None:
    slow = Activity(1.0, frozenset({"S", state}))
    assert not checked(*[(False, slow)] * 1000).is_hung


def test_a_process_that_waits_for_a_core_behind_others_never_hangs() -> None:
    """Its time on the core and in the queue grows: 4 % of a core, as seen on a busy machine."""
    checks = [(False, Activity(1.0 + 0.2 * number, frozenset("S"))) for number in range(1, 1000)]
    assert not checked(*checks).is_hung


def test_an_answer_or_progress_begins_the_count_anew() -> None:
    still = [(False, IDLE)] * (HUNG_AFTER_CHECKS - 1)
    assert not checked(*still, (True, IDLE), *still).is_hung
    assert not checked(*still, (False, Activity(2.0, frozenset("S"))), *[(False, IDLE)], *still[:-2]).is_hung


def test_what_cannot_be_known_is_not_counted() -> None:
    """Redis is away: no record of a service can be read."""
    count = checked(*[(None, IDLE)] * 1000)
    assert not count.is_hung
    assert count.num_silent == 0


def test_a_stopped_process_makes_no_progress_and_a_computing_one_does() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            assert "R" in activity_of(process.pid).states
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            stopped = activity_of(process.pid)
            assert stopped.states == {"T"}
            assert not activity_of(process.pid).is_progress_since(stopped, 5.0)
        finally:
            process.kill()
    assert activity_of(process.pid) == Activity(0.0, frozenset())


LIMIT_S = 600.0


def started(limit_s: float = LIMIT_S) -> tuple[StartLimit, float]:
    return StartLimit(limit_s, 1000.0), 1000.0


def test_a_start_that_computes_goes_on_beyond_its_limit() -> None:
    progress, now = started()
    used_s = 0.0
    while now < 1000.0 + 3 * LIMIT_S:
        now += CHECK_INTERVAL_S
        used_s += 0.1 * CHECK_INTERVAL_S  # other programs have the rest
        progress.note(now, {7: Activity(1.0, frozenset("S")), 8: Activity(used_s, frozenset("S"))})
        assert not progress.has_failed(now)
    assert not progress.has_failed(now + STILL_S - 1)
    assert progress.has_failed(now + STILL_S)


def test_a_start_that_stands_still_fails_at_its_limit() -> None:
    progress, now = started()
    while now < 1000.0 + LIMIT_S:
        now += CHECK_INTERVAL_S
        assert not progress.has_failed(now)
        assert progress.is_due(now)
        progress.note(now, {7: Activity(1.0, frozenset("S"))})
        assert not progress.is_due(now)
    assert progress.has_failed(now + 1)


def test_a_limit_of_a_second_is_one() -> None:
    progress, now = started(1.0)
    assert not progress.has_failed(now + 0.9)
    assert progress.has_failed(now + 1.1)
