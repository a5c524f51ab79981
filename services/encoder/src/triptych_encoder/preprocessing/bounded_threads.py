"""Blocking work in threads, bounded together in number and cost, and each in time. First come, first served.

A thread cannot be ended. Work that takes too long fails its job, and keeps its share of the capacity until it
ends; if it does not end, the service ends and is restarted.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from triptych_common.runtime.liveness import run_delay_s
from triptych_encoder.encoding import EngineFailedError, PreprocessFailedError
from triptych_encoder.preprocessing.cost_budget import CostBudget
from triptych_vllm_connector.decoding.processes import CORE_WAITS, CoreWaits

Result = TypeVar("Result")


class _Running:
    """Measures the time of one thread's work, without the time in which other programs had its core."""

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._thread: int | None = None  # the kernel's id, once it runs
        self._waited_before_s = 0.0
        self._child_waits = CoreWaits()  # of a process that decodes for the thread
        self._waited_s = 0.0

    def begin(self) -> None:
        """Record that the calling thread does the work; it may have done other work before."""
        thread = threading.get_native_id()
        self._waited_before_s = waited_s(thread)
        self._thread = thread
        CORE_WAITS.set(self._child_waits)

    def elapsed_s(self, now: float) -> float:
        """Seconds in which the thread ran or slept since its start; `now` is the loop's clock."""
        if self._thread is not None:
            waited = waited_s(self._thread) - self._waited_before_s + self._child_waits()
            self._waited_s = max(self._waited_s, waited)
        return now - self._started_at - self._waited_s


def waited_s(thread: int) -> float:
    """See `liveness.run_delay_s`; `thread` is the kernel's id of a thread of this process."""
    return run_delay_s(Path(f"/proc/self/task/{thread}/schedstat"))


class _Thread:
    """Daemon thread that does one piece of work after the other; the process exits without waiting for it.

    `concurrent.futures` would wait for its threads at exit, even for one that never ends.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="triptych-preprocess", daemon=True).start()

    def do(self, work: Callable[[], None]) -> None:
        """Queue `work`, which must not raise."""
        self._work.put(work)

    def _run(self) -> None:
        while True:
            self._work.get()()


class BoundedThreads:
    """Threads of one event loop, reused: starting one takes as long as a small item."""

    def __init__(
        self,
        capacity: int,
        limit_s: float,
        stuck_after_s: float,
        num_threads: int = 1 << 30,
        large_cost: int = 1 << 62,
    ) -> None:
        """
        Args:
            capacity: cost of everything that runs at once; what costs more runs alone.
            limit_s: after so long the work has failed.
            stuck_after_s: after so long more it counts as stuck.
            num_threads: that run at once; one that runs too long no longer counts.
            large_cost: what costs more has as many threads of its own, so that others do not wait for it.
        """
        self._budget = CostBudget(capacity)
        self._places, self._large_places = CostBudget(num_threads), CostBudget(num_threads)
        self._large_cost = large_cost
        self._limit_s = limit_s
        self._stuck_after_s = stuck_after_s
        self._running: dict[asyncio.Future[Any], _Running] = {}
        self._idle: list[_Thread] = []

    @property
    def num_running(self) -> int:
        """Threads that have not ended, those that were given up included."""
        return len(self._running)

    async def run(self, cost: int, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread, and return or raise what it does.

        Raises:
            PreprocessFailedError: it has not ended in time, or no thread could be started.
        """
        places = self._large_places if cost > self._large_cost else self._places
        async with places.hold(1):
            return await self._run(cost, work)

    async def _run(self, cost: int, work: Callable[[], Result]) -> Result:
        held = await self._budget.acquire(cost)
        running = _Running(asyncio.get_running_loop().time())
        try:
            future = self._start(work, running)
        except RuntimeError as error:
            self._budget.release(held)
            raise PreprocessFailedError("the encoder has no thread for the item") from error
        self._running[future] = running
        future.add_done_callback(lambda done: self._ended(done, held))
        while (left_s := self._limit_s - running.elapsed_s(asyncio.get_running_loop().time())) > 0:
            done, _ = await asyncio.wait({future}, timeout=left_s)
            if done:
                return future.result()
        raise PreprocessFailedError("the item was not preprocessed in time")

    def check(self) -> None:
        """Raise EngineFailedError if a thread is stuck: nothing else would give its share back."""
        now = asyncio.get_running_loop().time()
        limit_s = self._limit_s + self._stuck_after_s
        if any(each.elapsed_s(now) > limit_s for each in self._running.values()):
            raise EngineFailedError("preprocessing of an item does not end")

    def _start(self, work: Callable[[], Result], running: "_Running") -> "asyncio.Future[Result]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        thread = self._idle.pop() if self._idle else _Thread()

        def settle(result: Result | None, error: BaseException | None) -> None:
            self._idle.append(thread)
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        def target() -> None:
            running.begin()
            outcome: tuple[Result | None, BaseException | None]
            try:
                outcome = (work(), None)
            except BaseException as error:  # raised again in `run`
                outcome = (None, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: no job waits any more
                loop.call_soon_threadsafe(settle, *outcome)

        thread.do(target)
        return future

    def _ended(self, future: "asyncio.Future[Any]", held: int) -> None:
        del self._running[future]
        future.exception()  # retrieved: after the time limit no job does
        self._budget.release(held)
