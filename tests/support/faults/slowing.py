"""Processes that get a small part of the time: stopped and let go on, in short turns."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPPED_S, RUNNING_S = 0.03, 0.005


@contextmanager
def in_short_turns(stop: Callable[[], None], go_on: Callable[[], None]) -> Iterator[None]:
    """Until the block ends; then it goes on."""
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            stop()
            done.wait(STOPPED_S)
            go_on()
            done.wait(RUNNING_S)

    thread = threading.Thread(target=run, name="slow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(10.0)
        go_on()
