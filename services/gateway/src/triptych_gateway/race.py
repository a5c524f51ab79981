"""Work that another event may end: a client that leaves, a deadline, an item's failure.

`Guard` ends a block of its own task on demand; `race` runs a coroutine beside others that may raise.
Neither keeps what it raises: a failure's traceback holds frames, and these may hold a request's media.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from triptych_common.domain.errors import RequestError
from triptych_gateway.errors import unavailable

T = TypeVar("T")


async def race(work: Coroutine[Any, Any, T], *guards: Coroutine[Any, Any, None]) -> T:
    """Return the result of `work`, unless a guard raises first; then `work` is cancelled and awaited.

    A guard that returns does not end the work. When both failed, the guard's exception is
    raised: it explains the work's. All tasks have ended when this returns or raises.
    """
    loop = asyncio.get_running_loop()
    worker = loop.create_task(work)
    watchers = [loop.create_task(guard) for guard in guards]
    failure: BaseException | None = None
    try:
        won = await _settle(worker, watchers)
        failure = None if won else next((task.exception() for task in watchers if _failed(task)), None)
        if failure is not None:
            raise failure
        return worker.result()
    finally:
        del worker, watchers, failure  # else only a garbage collection frees what the work held


async def _settle(worker: asyncio.Task[Any], watchers: list[asyncio.Task[None]]) -> bool:
    """Return whether the work ended well before any guard raised. All tasks have ended then."""
    pending: set[asyncio.Future[Any]] = {worker, *watchers}
    try:
        while not worker.done() and not any(_failed(watcher) for watcher in watchers):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    finally:
        won = worker.done() and not _failed(worker)
        for task in (worker, *watchers):
            task.cancel()
        await asyncio.gather(worker, *watchers, return_exceptions=True)
    return won


def _failed(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


class Guard:
    """Block that ends with an error as soon as `fail` is called, from anywhere on the event loop.

    Costs no task. As `asyncio.timeout`, it cancels the block's task and takes the cancellation back, so that
    it nests with timeouts, other guards, and cancellations from outside, which go on.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None  # while the block runs
        self._num_cancels = 0
        self._error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """End the block with `error`. Only the first call counts, and none after the block."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a guard needs a task")
        self._task, self._num_cancels = task, task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        failure, self._error = self._error, None
        if task is None or failure is None:
            return
        was_cancelled = task.uncancel() > self._num_cancels  # from outside, too
        try:
            # Whatever else the block raised, the guard's error explains it.
            if error is not None and not was_cancelled:
                raise failure from error
        finally:
            del failure, error  # its traceback holds this frame, and what the block held with it


class StepTimer:
    """Timer that fails a guard when one step of its block takes longer than `limit_s`.

    One timer for all steps: it looks when it is due whether the step that it was set for still runs.
    """

    def __init__(self, guard: Guard, limit_s: float) -> None:
        self._guard = guard
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._until: float | None = None  # the loop's seconds; None: no step runs
        self._error: Callable[[], Exception] = TimeoutError

    def begin_step(self, error: Callable[[], Exception]) -> None:
        """Begin a step and end the one before; `error` makes the error for a step that takes too long."""
        self._until, self._error = self._loop.time() + self._limit_s, error
        if self._timer is None:
            self._timer = self._loop.call_at(self._until, self._on_due)

    def close(self) -> None:
        """End the last step and the timer."""
        self._until = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_due(self) -> None:
        self._timer = None
        if self._until is None:
            return
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._on_due)
        else:
            self._guard.fail(self._error())


class CutOff:
    """Switch that ends running requests when the gateway stops waiting for them."""

    def __init__(self) -> None:
        self._guards: set[Guard] = set()
        self._is_set = False

    def set(self) -> None:
        """End all requests, and those that begin from now on."""
        self._is_set = True
        for guard in tuple(self._guards):
            guard.fail(self._error())

    @contextmanager
    def hold(self, guard: Guard) -> Iterator[None]:
        """Run the block until `set` ends it by `guard`."""
        if self._is_set:
            raise self._error()
        self._guards.add(guard)
        try:
            yield
        finally:
            self._guards.discard(guard)

    def _error(self) -> RequestError:
        return unavailable("draining", "this gateway is shutting down; send the request again")
