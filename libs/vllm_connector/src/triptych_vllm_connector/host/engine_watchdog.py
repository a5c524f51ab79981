"""Detects an engine that hangs, unlike a slow one, by its progress, and ends the work that waits for it.

On a machine with other work an engine may need minutes for what takes it a second alone. Ended in the midst
of that, it is started again for two minutes, and meets the same item afterwards. So limits of engines are no
wall clocks: an engine without an answer is left alone while it makes progress.

    CPU time                 progress of an engine on a CPU; beside an idle GPU it compiles or prepares
    GPU busy                 a kernel that runs long, or that hangs, for which the host spins
    none of these            no progress: it hangs

Waits for a core are no progress here: on a busy machine the timers of a hanging engine's threads wait too.
Progress without an answer ends as well: an endless loop computes. On a CPU, or with an idle GPU, that is a
multiple of the limit. A kernel that hangs keeps its GPU busy as a long one does, so a busy GPU is measured by
the longest answer seen. Layers are not counted: a CUDA graph runs all of them as one operation.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import psutil

from triptych_common.domain.errors import TriptychError
from triptych_common.runtime.liveness import Activity, activity_of

NUM_LOOKS = 2  # within the limit: the second one is compared with the first
SPIN_FACTOR = 10
"""Multiple of the limit, and of the longest answer, after which a computing engine is in an endless loop."""

FindActivity = Callable[[], Activity]


def engine_activity(is_gpu_busy: Callable[[], bool]) -> FindActivity:
    """Return a function that sums the CPU time of all processes below this one, its engine's.

    An engine starts its processes once: those that are there now are summed, and one that has ended counts
    as before.

    Args:
        is_gpu_busy: whether its GPUs compute at this moment; False if it has none.
    """
    pids = [process.pid for process in psutil.Process().children(recursive=True)]
    return partial(_sum, dict.fromkeys(pids, 0.0), is_gpu_busy)


def _sum(known: dict[int, float], is_gpu_busy: Callable[[], bool]) -> Activity:
    """Return the sum over the processes in `known`, whose CPU seconds are updated."""
    known.update({pid: found.cpu_s for pid in known if (found := activity_of(pid)).states})
    cpu_s = sum(known.values())
    return Activity(cpu_s, frozenset(), cpu_s, is_gpu_busy())


class EngineWatchdog:
    """Fails the work that waits for one engine when it hangs.

    Its host lives: it stays registered, and an encoder's renews the leases of its jobs. An answer to any of
    its work shows that an engine is only slow, and so does its progress.
    """

    def __init__(self, limit_s: float, activity: FindActivity, error: type[TriptychError]) -> None:
        """
        Args:
            limit_s: seconds without an answer and without progress after which the engine hangs.
            activity: what the engine has done since its start; asked only while no answer comes.
            error: raised if the engine hangs.
        """
        self._limit_s = limit_s
        self._find_activity = activity
        self._error = error
        self._timers: set[asyncio.Timeout] = set()
        self._next_look: asyncio.TimerHandle | None = None
        self._before: Activity | None = None  # at the last look since the last answer
        self._worked_s = self._longest_work_s = 0.0  # CPU time seen without an answer; of an answer
        self._waits_since = self._longest_s = 0.0  # for an answer, or since the GPU became busy; of an answer
        self._has_answered = False

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Watch the engine during the block, which ends with its answer.

        Raises:
            TriptychError: `error`: the engine has answered nothing, and hangs.
        """
        try:
            async with asyncio.timeout(None) as timer:
                if not self._timers:
                    self._watch_anew()
                self._timers.add(timer)
                try:
                    yield
                finally:
                    self._timers.discard(timer)
                    if not self._timers:
                        self._cancel_look()
        except TimeoutError as error:
            raise self._error(
                f"vLLM's engine has not answered for {self._limit_s} s or more, and makes no progress"
            ) from error
        # Work that was cancelled, or that the host itself could not do, is no answer.
        self._has_answered = True
        self._longest_work_s = max(self._longest_work_s, self._worked_s)
        self._longest_s = max(self._longest_s, asyncio.get_running_loop().time() - self._waits_since)
        if self._timers:
            self._watch_anew()

    def _watch_anew(self) -> None:
        """Begin at an answer, or when an idle engine gets work."""
        self._before, self._worked_s = None, 0.0
        self._waits_since = asyncio.get_running_loop().time()
        self._plan_look()

    def _plan_look(self) -> None:
        self._cancel_look()
        self._next_look = asyncio.get_running_loop().call_later(self._limit_s / NUM_LOOKS, self._look)

    def _cancel_look(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def _look(self) -> None:
        self._next_look = None
        now = asyncio.get_running_loop().time()
        if not self._is_hung(self._find_activity(), now):
            self._plan_look()
            return
        for timer in self._timers:
            if not timer.expired():
                timer.reschedule(now)

    def _is_hung(self, activity: Activity, now: float) -> bool:
        before, self._before = self._before, activity
        if before is None:
            return False
        if not activity.is_progress_since(before, self._limit_s / NUM_LOOKS):
            return True
        self._worked_s += activity.cpu_s - before.cpu_s
        if not activity.is_gpu_busy:
            return self._worked_s > SPIN_FACTOR * max(self._limit_s, self._longest_work_s)
        if not before.is_gpu_busy:
            self._waits_since = now
        least_s = self._limit_s if self._has_answered else SPIN_FACTOR * self._limit_s
        return now - self._waits_since >= max(least_s, SPIN_FACTOR * self._longest_s)
