"""Calls back when a CUDA event has completed, without a wait on the engine's thread."""

import queue
import threading
from collections.abc import Callable

from triptych_common.region.cuda.driver import CudaDriver, CudaError
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

CLOSE_TIMEOUT_S = 5.0

OnDone = Callable[[CudaError | None], None]
"""Called with None when the stream has done its work, or with the error of a GPU that does no more."""


class EventReleaser:
    """One thread that waits for events, in the order they were recorded.

    `call_after` may be called from anywhere, finalizers included: `SimpleQueue.put` is reentrant.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._queue: queue.SimpleQueue[tuple[int, int | None, OnDone] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="triptych-events", daemon=True)
        self._thread.start()

    def release_after(self, stream: int, on_release: Callable[[], None]) -> None:
        """Have the thread call `on_release` once everything that is on `stream` now has been done.

        When CUDA itself has failed, no kernel can read any more and nothing is waited for.
        """
        self.call_after(stream, lambda error: on_release())

    def call_after(self, stream: int, on_done: OnDone) -> None:
        """Have the thread call `on_done` once everything that is on `stream` now has been done.

        Returns at once. `on_done` is never called here: a finalizer's caller may hold locks that it needs.
        """
        event: int | None = None
        try:
            event = self._record(stream)
        except CudaError as error:
            log.warning("cuda event not recorded", error=str(error))
        self._queue.put((stream, event, on_done))

    def _record(self, stream: int) -> int:
        self._driver.bind_thread()  # a finalizer may run in a thread that has never used the GPU
        event = self._driver.event_create()
        try:
            self._driver.event_record(event, stream)
        except CudaError:
            self._driver.event_destroy(event)
            raise
        return event

    def close(self) -> None:
        """Wait for pending releases, in bounded time."""
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        is_bound = False
        while (waiting := self._queue.get()) is not None:
            stream, event, on_done = waiting
            failure: CudaError | None = None
            try:
                if not is_bound:
                    self._driver.bind_thread()
                    is_bound = True
                if event is None:  # what is on the stream may still run
                    self._driver.stream_synchronize(stream)
                else:
                    self._driver.event_synchronize(event)
                    self._driver.event_destroy(event)
            except CudaError as error:
                log.warning("cuda event not waited for", error=str(error))
                failure = error
            try:
                on_done(failure)
            except Exception:  # this thread serves all streams' work: one call must not end it
                log.exception("call after an event failed")
