"""Calls back when a CUDA event has completed, without a wait on the engine's thread."""

import queue
import threading
from collections.abc import Callable

from triptych_common.region.cuda.driver import CudaDriver, CudaError
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

CLOSE_TIMEOUT_S = 5.0


class EventReleaser:
    """One thread that waits for events, in the order they were recorded.

    `release_after` may be called from anywhere, finalizers included: `SimpleQueue.put` is reentrant.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._queue: queue.SimpleQueue[tuple[int | None, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="triptych-events", daemon=True)
        self._thread.start()

    def release_after(self, stream: int, on_release: Callable[[], None]) -> None:
        """Have the thread call `on_release` once everything that is on `stream` now has been done.

        Returns at once. When CUDA itself has failed, no kernel can read any more and nothing is waited for.
        `on_release` is never called here: a finalizer's caller may hold locks that it needs.
        """
        event: int | None = None
        try:
            event = self._record(stream)
        except CudaError as error:
            log.warning("cuda event not recorded", error=str(error))
        self._queue.put((event, on_release))

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
            event, on_release = waiting
            try:
                if not is_bound:
                    self._driver.bind_thread()
                    is_bound = True
                if event is not None:
                    self._driver.event_synchronize(event)
                    self._driver.event_destroy(event)
            except CudaError as error:
                log.warning("cuda event not waited for", error=str(error))
            try:
                on_release()
            except Exception:  # this thread serves all views: one release must not end it
                log.exception("release of a view failed")
