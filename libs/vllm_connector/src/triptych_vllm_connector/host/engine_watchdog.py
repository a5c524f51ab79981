"""Detects an engine that hangs, unlike a slow one, by its CPU time, and ends the work that waits for it.

On a machine with other work an engine may need minutes for what takes it a second alone. Ended in the midst
of that, it is started again for two minutes, and meets the same item afterwards. So the limits of engines on
a CPU are no wall clocks: an engine without an answer is left alone while its processes compute.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil

from triptych_common.domain.errors import TriptychError

LEAST_SHARE = 0.01  # of a core: what idle threads of a hanging engine wake for is less
SPIN_FACTOR = 10
"""Multiple of the limit, and of the longest answer, after which a computing engine is in an endless loop."""

UsedSeconds = Callable[[], float]


class StallCheck:
    """Checks one engine each time it has not answered for `limit_s` seconds. Has no clock of its own."""

    def __init__(self, limit_s: float, used_s: UsedSeconds | None) -> None:
        """
        Args:
            limit_s: seconds between two looks.
            used_s: CPU seconds that the engine has used since its start. None: it computes on a GPU, where a
                host that waits spins; every look without an answer then finds a stalled engine.
        """
        self.limit_s = limit_s
        self._used_s = used_s
        self._longest_s = 0.0  # CPU time of an answer
        self._at_answer = self._at_look = used_s() if used_s else 0.0

    def start(self) -> None:
        """Record that an idle engine gets work."""
        if self._used_s is not None:
            self._at_answer = self._at_look = self._used_s()

    def note_answer(self) -> None:
        """Record that the engine has answered some of its work."""
        before = self._at_answer
        self.start()
        self._longest_s = max(self._longest_s, self._at_answer - before)

    def is_stalled(self) -> bool:
        """True if the engine hangs; called after each `limit_s` seconds without an answer."""
        if self._used_s is None:
            return True
        used_s = self._used_s()
        has_computed = used_s - self._at_look >= LEAST_SHARE * self.limit_s
        self._at_look = used_s
        return not has_computed or used_s - self._at_answer > SPIN_FACTOR * max(self.limit_s, self._longest_s)


def engine_cpu_seconds(*, on_gpu: bool) -> UsedSeconds | None:
    """Function that sums the CPU seconds of this process's running engine.

    None: it computes on a GPU (`on_gpu`). An engine starts its processes once: those that are there now are
    summed, and one that has ended counts as before.
    """
    if on_gpu:
        return None
    processes = psutil.Process().children(recursive=True)
    known: dict[int, float] = {}

    def used_s() -> float:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                known[process.pid] = times.user + times.system
        return sum(known.values())

    return used_s


class EngineWatchdog:
    """Fails the work that waits for one engine when it hangs.

    Its host lives: it stays registered, and an encoder's renews the leases of its jobs. An answer to any of
    its work shows that an engine is only slow, and so does its CPU time.
    """

    def __init__(self, check: StallCheck, error: type[TriptychError]) -> None:
        """`error` is raised if the engine hangs."""
        self._check = check
        self._error = error
        self._timers: set[asyncio.Timeout] = set()
        self._next_look: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Watch the engine during the block, which ends with its answer.

        Raises:
            TriptychError: `error`: the engine has answered nothing, and hangs.
        """
        try:
            async with asyncio.timeout(None) as timer:
                if not self._timers:
                    self._check.start()
                    self._plan_look()
                self._timers.add(timer)
                try:
                    yield
                finally:
                    self._timers.discard(timer)
                    if not self._timers:
                        self._cancel_look()
        except TimeoutError as error:
            raise self._error(
                f"vLLM's engine has not answered for {self._check.limit_s} s, and computes nothing"
            ) from error
        # Work that was cancelled, or that the host itself could not do, is no answer.
        self._check.note_answer()
        if self._timers:
            self._plan_look()

    def _plan_look(self) -> None:
        self._cancel_look()
        self._next_look = asyncio.get_running_loop().call_later(self._check.limit_s, self._look)

    def _cancel_look(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def _look(self) -> None:
        self._next_look = None
        if not self._check.is_stalled():
            self._plan_look()
            return
        now = asyncio.get_running_loop().time()
        for timer in self._timers:
            if not timer.expired():
                timer.reschedule(now)
