"""Distinguish a process that hangs from a slow one, by its answers and its CPU time.

A process that answers lives, and so does one that gets CPU time, waits for a core behind other programs,
waits for a disk, or is held by a debugger: however late it answers, it is never taken for hung. One that is
stopped (SIGSTOP), or whose event loop waits for what does not come, does none of this. The same `Activity` is
compared of services (supervisor, health check of a container) and of vLLM's engines (`EngineWatchdog`).

Counted are checks in a row, not seconds: where the checking process gets no core itself, it finds nothing.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CHECK_INTERVAL_S = 5.0
HUNG_AFTER_CHECKS = 6
STILL_S = 60.0
MIN_SHARE = 0.01  # of a core: heartbeats and timers of an idle process use less
_PROGRESSING = frozenset("RDt")  # runs or waits for a core; waits for a disk; held by a debugger
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Activity:
    """CPU time and state of processes and all their threads since their start."""

    used_s: float  # on a core, or waiting for one
    states: frozenset[str]  # of the threads, in the letters of /proc
    cpu_s: float = 0.0  # on a core alone
    is_gpu_busy: bool = False

    def is_progress_since(self, before: "Activity", interval_s: float) -> bool:
        # The sum gets smaller when a thread ends, which is progress, too.
        used_s = abs(self.used_s - before.used_s)
        return self.is_gpu_busy or bool(self.states & _PROGRESSING) or used_s > MIN_SHARE * interval_s


def activity_of(pid: int, proc: Path = Path("/proc")) -> Activity:
    """Return the activity of process `pid` up to now; none if the process has ended."""
    cpu_s = used_s = 0.0
    states = set[str]()
    try:
        fields = _stat(proc / str(pid) / "stat")
        cpu_s = used_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S  # utime, stime
        for task in (proc / str(pid) / "task").iterdir():
            states.add(_stat(task / "stat")[0])
            used_s += run_delay_s(task / "schedstat")
    except (OSError, IndexError):  # it, or one of its threads, has ended meanwhile
        pass
    return Activity(used_s, frozenset(states), cpu_s)


def _stat(path: Path) -> list[str]:
    """Return the fields from the state on; the name before it may hold any character."""
    return path.read_text().rpartition(")")[2].split()


def run_delay_s(path: Path) -> float:
    """Return the seconds that a thread was ready to run and another one had the core.

    `path`: its `schedstat`. 0: the thread has ended, or Linux does not count them.
    """
    try:
        return int(path.read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


class StartLimit:
    """A start that takes longer than its limit goes on while any process of the service computes or reads.

    A download, a compilation and the weights of a large model take as long as the machine needs; what has
    stood still for `STILL_S` seconds behind the limit will not become ready.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        """Begin the start at `now`, seconds of a clock that does not jump, as in all calls."""
        self._limit_s, self._started_at = limit_s, now
        self._noted_at = self._moved_at = now
        self._before: Mapping[int, Activity] = {}

    def elapsed_s(self, now: float) -> float:
        return now - self._started_at

    def is_due(self, now: float) -> bool:
        """Return whether the activities are to be noted: they cost a look at all processes."""
        return now - self._noted_at >= CHECK_INTERVAL_S

    def note(self, now: float, activities: Mapping[int, Activity]) -> None:
        """Note what the service's processes have done; `activities`: by pid."""
        interval_s, self._noted_at = now - self._noted_at, now
        before, self._before = self._before, activities
        if before.keys() != activities.keys() or any(
            each.is_progress_since(before[pid], interval_s) for pid, each in activities.items()
        ):
            self._moved_at = now

    def has_failed(self, now: float) -> bool:
        """Return whether the limit is over, and nothing has moved for a while."""
        still_s = now - self._moved_at
        return now - self._started_at > self._limit_s and still_s >= min(STILL_S, self._limit_s)


class HangCount:
    """Checks of one process in a row without an answer, and those of them without progress either."""

    def __init__(self, activity: Activity) -> None:
        self.num_silent = self.num_still = 0
        self._before = activity

    def count(self, answers: bool | None, activity: Activity, interval_s: float) -> None:
        """Count one check, `interval_s` after the one before. `answers`: None where it cannot be known."""
        before, self._before = self._before, activity
        if answers is None:
            return
        self.num_silent = 0 if answers else self.num_silent + 1
        is_still = not answers and not activity.is_progress_since(before, interval_s)
        self.num_still = self.num_still + 1 if is_still else 0

    @property
    def is_hung(self) -> bool:
        return self.num_still >= HUNG_AFTER_CHECKS
