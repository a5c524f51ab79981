"""EngineCore: masks are made in threads; the engine leaves a thread behind whose mask takes too long.

xgrammar's call that makes a mask cannot be interrupted, but it lets other threads run. With 150,000 tokens
most masks take 0.03 ms; behind the `#` of the pattern `^([^#]*|#(.{1,500}a|.{1,501}b|…))$`, where no walk of
the compile process comes, one takes seconds.

    EngineCore --all masks of a step--> thread --> xgrammar
        waits until all are made, or one has taken more CPU time than its request may
        <-- its request ends; the thread goes on at the lowest priority, and ends with the call
"""

import os
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Protocol

MAX_LEFT = 16
"""Threads that are left behind at once; while there are as many, a step waits for whatever a mask takes."""
_LOWEST_PRIORITY = 19
_BETWEEN_S = 0.01
"""Seconds until the engine's thread first looks at how long a mask takes, and between two masks."""


class Mask(Protocol):
    """A mask to make, of one grammar of a request."""

    def make(self) -> None:
        """Make it. Called in another thread than the engine's, and may take long."""

    def finish(self) -> None:
        """Take over what `make` has made, in that thread. Not called for a mask that was left behind."""

    def leave(self) -> None:
        """End the request: `make` is under way and takes too long."""

    def longest_s(self) -> float:
        """Return the CPU seconds that `make` may take."""
        ...


class MaskThreads:
    """Threads that make masks. Those that wait for work are used again."""

    def __init__(self) -> None:
        self._free: list[_Thread] = []
        self._left: list[_Thread] = []

    def make(self, masks: Sequence[Mask], num_threads: int = 1) -> None:
        """Make masks, or leave those behind that take too long. May be called in several threads.

        Raises:
            BaseException: what `Mask.make` raised first.
        """
        num_each = -(-len(masks) // num_threads)
        parts = [masks[first : first + num_each] for first in range(0, len(masks), num_each or 1)]
        started = [self._start(part) for part in parts]
        errors = [error for each in started if (error := self._finish(*each)) is not None]
        if errors:
            raise errors[0]

    def _start(self, masks: Sequence[Mask]) -> tuple["_Thread", "_Task"]:
        try:
            thread = self._free.pop()
        except IndexError:
            thread = _Thread()
        task = _Task(masks)
        thread.tasks.put(task)
        return thread, task

    def _finish(self, thread: "_Thread", task: "_Task") -> BaseException | None:
        while (late := task.wait(thread, may_leave=self._may_leave())) is not None:
            late.leave()
            self._left.append(thread)
            thread, task = self._start(task.masks[task.num_done + 1 :])
        self._free.append(thread)
        return task.error

    def _may_leave(self) -> bool:
        self._left = [each for each in self._left if each.is_alive()]
        return len(self._left) < MAX_LEFT


class _Thread(threading.Thread):
    """Carries out tasks until it was left behind with one."""

    ident: int
    native_id: int

    def __init__(self) -> None:
        super().__init__(name="triptych-masks", daemon=True)
        self.tasks: SimpleQueue[_Task] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while self.tasks.get().run():
            pass


class _Task:
    """Masks to make one after another, in one thread, while another waits."""

    def __init__(self, masks: Sequence[Mask]) -> None:
        self.masks = masks
        self.num_done = 0
        self.error: BaseException | None = None
        self._began_s: float | None = None  # CPU time of the thread, while it makes a mask
        self._is_left = False
        self._lock = threading.Lock()
        self._is_done = threading.Event()

    def run(self) -> bool:
        """Make the masks; return False if it was left behind with one of them."""
        try:
            for mask in self.masks:
                with self._lock:
                    self._began_s = time.thread_time()
                mask.make()
                with self._lock:
                    if self._is_left:
                        return False
                    self._began_s = None
                    self.num_done += 1
                mask.finish()
        except BaseException as error:
            with self._lock:
                if self._is_left:
                    return False
                self._began_s, self.error = None, error
        self._is_done.set()
        return True

    def wait(self, thread: _Thread, *, may_leave: bool) -> Mask | None:
        """Wait until the masks are made. Return the one that takes too long, with which `thread` is left."""
        clock, wait_s = time.pthread_getcpuclockid(thread.ident), _BETWEEN_S
        while not self._is_done.wait(wait_s if may_leave else None):
            with self._lock:
                if self._began_s is None:
                    wait_s = _BETWEEN_S
                    continue
                mask = self.masks[self.num_done]
                wait_s = mask.longest_s() - (time.clock_gettime(clock) - self._began_s)
                if wait_s <= 0:  # the thread needs the lock before it can end
                    os.setpriority(os.PRIO_PROCESS, thread.native_id, _LOWEST_PRIORITY)
                    self._is_left = True
                    return mask
        return None
