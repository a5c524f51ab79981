"""Signals to the processes of a service: its host, those of its engine, or all."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

import psutil

from support.fast.faults import SLOW_RUNNING_S, SLOW_STOPPED_S
from support.system import System


class Part(StrEnum):
    """Of a service. Those without an engine have a host alone."""

    HOST = "host"
    ENGINE = "engine"
    WHOLE = "whole"


def pids_of(system: System, name: str, part: Part = Part.WHOLE) -> list[int]:
    """Of the life that the supervisor knows; none of it if it has ended."""
    host = system.services()[name]["pid"]
    if host is None:
        return []
    try:
        children = [child.pid for child in psutil.Process(host).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    return {Part.HOST: [host], Part.ENGINE: children, Part.WHOLE: [host, *children]}[part]


def send(pids: Sequence[int], number: signal.Signals) -> None:
    """To processes that have ended: nothing."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def slowed(pids: Sequence[int]) -> Iterator[None]:
    """They get a small part of the time, until the block ends."""
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            send(pids, signal.SIGSTOP)
            done.wait(SLOW_STOPPED_S)
            send(pids, signal.SIGCONT)
            done.wait(SLOW_RUNNING_S)

    thread = threading.Thread(target=run, name="slow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(10.0)
        send(pids, signal.SIGCONT)
