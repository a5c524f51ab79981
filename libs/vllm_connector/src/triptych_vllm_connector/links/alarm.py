"""A timer thread: wakes the engine's thread, which blocks on its input without a timeout."""

import threading
import time
from collections.abc import Callable


class Alarm:
    """Set it again and again; the earliest time counts, and after a call it is not set."""

    def __init__(self, on_time: Callable[[], None]) -> None:
        """`on_time` is called on the alarm's own thread, perhaps for a time that does not matter any more."""
        self._on_time = on_time
        self._changed = threading.Condition()
        self._when: float | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="triptych-alarm", daemon=True)
        self._thread.start()

    def set(self, when: float) -> None:
        """Call at `when` (monotonic seconds), unless it is set for earlier."""
        with self._changed:
            if self._when is None or when < self._when:
                self._when = when
                self._changed.notify()

    def close(self) -> None:
        """No call comes after this."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while self._wait():
            self._on_time()

    def _wait(self) -> bool:
        """Until the time is there. False: closed."""
        with self._changed:
            while not self._is_closed:
                remaining_s = None if self._when is None else self._when - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    self._when = None
                    return True
                self._changed.wait(remaining_s)
            return False
