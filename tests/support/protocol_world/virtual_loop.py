"""An event loop without I/O and without waiting: time is a number, and passes only when the test advances it.

Every actor of the model has one of its own, so that what an actor does is done when its turn ends, and
so that it can be killed: a killed process runs no `finally`.
"""

import asyncio
import heapq
import itertools
import random as real_random
import sys
import time as real_time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4 as real_uuid4

from triptych_common.store_session import session_state


class Clock:
    """Stands in for the module `time` in the packages under test; one for all actors."""

    def __init__(self) -> None:
        self.now = 0.0
        self._num_ids: Counter[str] = Counter()

    def reset(self) -> None:
        """A new world begins."""
        self.now = 0.0
        self._num_ids.clear()

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def new_id(self) -> "_Id":
        """Numbered per actor: equal states have equal ids, in whatever order they arose."""
        loop = asyncio._get_running_loop()
        name = loop.name if isinstance(loop, VirtualLoop) else ""
        self._num_ids[name] += 1
        return _Id(f"{name}-{self._num_ids[name]}")


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


SESSION_STAND_INS = (
    (session_state, "frame", whole_frame),
    (session_state, "decode_reply", whole_frame),
    (session_state, "FrameDecoder", WholeFrames),
)


class Longest:
    """Stands in for `random`, which only varies waits: all of them are the longest."""

    def uniform(self, shortest: float, longest: float) -> float:
        return longest


if TYPE_CHECKING:
    EventLoop: Any  # so that what is left out needs no mention
else:
    EventLoop = asyncio.AbstractEventLoop

CLOCK, LONGEST = Clock(), Longest()
PACKAGES = (
    "triptych_gateway", "triptych_encoder", "triptych_vllm_connector", "triptych_cache_store",
    "triptych_fabric", "tenacity",
)  # fmt: skip


@contextmanager
def virtual_time(stand_ins: Iterable[tuple[Any, str, Any]] = ()) -> Iterator[None]:
    """In our packages `time`, `uuid4` and `random` are the model's, which repeat themselves exactly.

    And the store's sessions write and read messages as they are.

    Args:
        stand_ins: what else stands in for something: module, name, what stands there.
    """
    undo: list[tuple[Any, str, Any]] = []
    for place, name, stand_in in (*SESSION_STAND_INS, *stand_ins):
        undo.append((place, name, getattr(place, name)))
        setattr(place, name, stand_in)
    for name, module in list(sys.modules.items()):
        if name.split(".", 1)[0] not in PACKAGES:
            continue
        for attribute, real, mine in (
            ("time", real_time, CLOCK),
            ("uuid4", real_uuid4, CLOCK.new_id),
            ("random", real_random, LONGEST),
        ):
            if vars(module).get(attribute) is real:
                undo.append((module, attribute, real))
                setattr(module, attribute, mine)
    try:
        yield
    finally:
        for module, attribute, real in undo:
            setattr(module, attribute, real)


class VirtualLoop(EventLoop):  # type: ignore[misc]
    """As much of an event loop as tasks, futures, locks, queues and timeouts need."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._upkeep: dict[asyncio.Task[Any], Callable[[], bool]] = {}
        self._idle: dict[asyncio.TimerHandle, Callable[[], bool]] = {}  # timers of upkeep, see `keep_up`
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

    call_soon_threadsafe = call_soon  # threads are played: they run when the world lets them

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(CLOCK.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        is_needed = self._upkeep.get(asyncio.current_task(self))  # type: ignore[arg-type]
        if is_needed is not None:
            self._idle[handle] = is_needed
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
                if not handle._cancelled:
                    handle._run()
        finally:
            asyncio._set_running_loop(None)
        self.tasks = [task for task in self.tasks if not task.done()]
        if self.errors and not self.is_dead:
            raise self.errors[0]
        return result

    def keep_up(self, work: Coroutine[Any, Any, Any], is_needed: Callable[[], bool]) -> None:
        """A periodic task without an end. Time passes for it when it is needed."""
        task = self.create_task(work)
        self.tasks.remove(task)
        self._upkeep[task] = is_needed

    @property
    def all_tasks(self) -> "list[asyncio.Task[Any]]":
        return [*self.tasks, *self._upkeep]

    def next_timer(self, *, with_upkeep: bool = True) -> float | None:
        """When something is to be done that matters."""
        self._drop_cancelled()
        times = [when for when, _, handle in self._timers if self._matters(handle, with_upkeep)]
        return min(times, default=None)

    def _matters(self, handle: asyncio.TimerHandle, with_upkeep: bool) -> bool:
        is_needed = self._idle.get(handle)
        return not handle.cancelled() and (is_needed is None or (with_upkeep and is_needed()))

    def _drop_cancelled(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            self._idle.pop(heapq.heappop(self._timers)[2], None)

    def run_due(self) -> None:
        """Timers whose time has come."""
        self._drop_cancelled()
        while self._timers and self._timers[0][0] <= CLOCK.now:
            handle = heapq.heappop(self._timers)[2]
            self._idle.pop(handle, None)
            self.run(handle._run)
            self._drop_cancelled()

    def kill(self) -> None:
        """Nothing runs here any more.

        Coroutines have to end somehow: they are cancelled, after their process was cut off from all others.
        """
        self.is_dead = True
        for task in self.all_tasks:
            task.cancel()
        self.run(lambda: None)
        self._timers.clear()
