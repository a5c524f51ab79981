"""An event loop without I/O and without waiting: time is a number, and passes only when it is told to.

Every actor of the model has one of its own, so that what an actor does is done when its turn ends, and
so that it can be killed: a killed process runs no `finally`.
"""

import asyncio
import heapq
import itertools
import sys
import time as real_time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4 as real_uuid4

from triptych_common.region import session


class Clock:
    """Stands in for the module `time` in the packages under test; one for all actors."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_ids = 0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def new_id(self) -> "_Id":
        self.num_ids += 1
        return _Id(f"{self.num_ids:032x}")


class _Id:
    """As much of a UUID as is used."""

    def __init__(self, digits: str) -> None:
        self.hex = digits


class WholeFrames:
    """Stands in for `FrameDecoder`: on the model's sockets travel messages, not their bytes."""

    def feed(self, message: Any) -> list[Any]:
        return [message]


def whole_frame(message: Any, seq: int | None = None) -> Any:
    """Stands in for `frame`."""
    return message if seq is None else message.model_copy(update={"seq": seq})


CLOCK = Clock()
PACKAGES = ("triptych_gateway", "triptych_encoder", "triptych_vllm_connector")


@contextmanager
def virtual_time() -> Iterator[None]:
    """In our packages `time` and `uuid4` are the model's, which repeat themselves exactly.

    And the store's sessions write and read messages as they are.
    """
    undo: list[tuple[Any, str, Any]] = [
        (session, name, getattr(session, name)) for name in ("frame", "decode_reply", "FrameDecoder")
    ]
    session.frame = session.decode_reply = whole_frame  # type: ignore[attr-defined]
    session.FrameDecoder = WholeFrames  # type: ignore[attr-defined,misc]
    for name, module in list(sys.modules.items()):
        if name.split(".", 1)[0] not in PACKAGES:
            continue
        for attribute, real, mine in (
            ("time", real_time, CLOCK),
            ("uuid4", real_uuid4, CLOCK.new_id),
        ):
            if vars(module).get(attribute) is real:
                undo.append((module, attribute, real))
                setattr(module, attribute, mine)
    try:
        yield
    finally:
        for module, attribute, real in undo:
            setattr(module, attribute, real)


class VirtualLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as tasks, futures, locks, queues and timeouts need."""

    def __init__(self) -> None:
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self.tasks: list[asyncio.Task[Any]] = []
        self.errors: list[BaseException] = []
        self.is_dead = False

    # ---- what asyncio asks for -------------------------------------------------------------------
    def time(self) -> float:
        return CLOCK.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(CLOCK.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time comes."""

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None
    ) -> "asyncio.Task[Any]":
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not self.is_dead:
            self.errors.append(error)

    # ---- what the model does ---------------------------------------------------------------------
    def run(self, action: Callable[[], Any]) -> Any:
        """`action`, and all that follows from it without time passing."""
        asyncio._set_running_loop(self)
        try:
            result = action()
            while self._ready:
                handle = self._ready.popleft()
                if not handle._cancelled:  # type: ignore[attr-defined]
                    handle._run()  # type: ignore[attr-defined]
        finally:
            asyncio._set_running_loop(None)
        self.tasks = [task for task in self.tasks if not task.done()]
        if self.errors and not self.is_dead:
            raise self.errors[0]
        return result

    def next_timer(self) -> float | None:
        while self._timers and self._timers[0][2]._cancelled:  # type: ignore[attr-defined]
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def run_due(self) -> None:
        """Timers whose time has come."""
        while (when := self.next_timer()) is not None and when <= CLOCK.now:
            handle = heapq.heappop(self._timers)[2]
            self.run(handle._run)  # type: ignore[attr-defined]

    def kill(self) -> None:
        """Nothing runs here any more.

        Coroutines have to end somehow: they are cancelled, after their process was cut off from all others.
        """
        self.is_dead = True
        for task in self.tasks:
            task.cancel()
        self.run(lambda: None)
        self._timers.clear()
