"""Blocking work in threads, bounded together in cost and each in time.

A thread cannot be ended. What runs too long fails for its job, and keeps its share of the capacity until
it ends; one that does not end ends the service, which is started again.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from triptych_encoder.encoding import EngineFailedError, PreprocessFailedError

Result = TypeVar("Result")


class BoundedThreads:
    """For one event loop. Threads are daemons: the process ends without waiting for them."""

    def __init__(self, capacity: int, limit_s: float, stuck_after_s: float) -> None:
        """
        Args:
            capacity: cost of everything that runs at once; what costs more runs alone.
            limit_s: after so long the work has failed.
            stuck_after_s: after so long more it counts as stuck.
        """
        self._capacity = capacity
        self._limit_s = limit_s
        self._stuck_after_s = stuck_after_s
        self._free = capacity
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()  # first come, first served
        self._running: dict[asyncio.Future[Any], float] = {}  # -> when it started, on the loop's clock

    @property
    def num_running(self) -> int:
        """Threads that have not ended, those that were given up included."""
        return len(self._running)

    async def run(self, cost: int, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises.

        Raises:
            PreprocessFailedError: it has not ended in time, or no thread could be started.
        """
        cost = min(cost, self._capacity)
        await self._acquire(cost)
        try:
            future = self._start(work)
        except RuntimeError as error:
            self._release(cost)
            raise PreprocessFailedError("the encoder has no thread for the item") from error
        self._running[future] = asyncio.get_running_loop().time()
        future.add_done_callback(lambda done: self._ended(done, cost))
        done, _ = await asyncio.wait({future}, timeout=self._limit_s)
        if not done:
            raise PreprocessFailedError("the item was not preprocessed in time")
        return future.result()

    def check(self) -> None:
        """Raises EngineFailedError when a thread is stuck: nothing else would give its share back."""
        now = asyncio.get_running_loop().time()
        if any(now - started > self._limit_s + self._stuck_after_s for started in self._running.values()):
            raise EngineFailedError("preprocessing of an item does not end")

    def _start(self, work: Callable[[], Result]) -> "asyncio.Future[Result]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(result: Result | None, error: BaseException | None) -> None:
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        def target() -> None:
            outcome: tuple[Result | None, BaseException | None]
            try:
                outcome = (work(), None)
            except BaseException as error:  # raised again in `run`
                outcome = (None, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: no job waits any more
                loop.call_soon_threadsafe(settle, *outcome)

        threading.Thread(target=target, name="triptych-preprocess", daemon=True).start()
        return future

    def _ended(self, future: "asyncio.Future[Any]", cost: int) -> None:
        del self._running[future]
        future.exception()  # retrieved: after the time limit no job does
        self._release(cost)

    async def _acquire(self, cost: int) -> None:
        if not self._waiting and cost <= self._free:
            self._free -= cost
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((cost, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(cost)
            else:
                with contextlib.suppress(ValueError):  # `_admit` has passed it over already
                    self._waiting.remove((cost, turn))
                self._admit()
            raise

    def _release(self, cost: int) -> None:
        self._free += cost
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            cost, turn = self._waiting[0]
            if turn.cancelled():  # its job was cancelled, and has not run yet
                self._waiting.popleft()
                continue
            if cost > self._free:
                return
            self._waiting.popleft()
            self._free -= cost
            turn.set_result(None)
