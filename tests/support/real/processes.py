"""Signals to the processes of a service: its host, those of its engine, or all."""

import contextlib
import os
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from functools import partial
from pathlib import Path

import psutil

from tests.support.faults.slowing import in_short_turns
from tests.support.real.system import System


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


def are_asleep(pids: Sequence[int]) -> bool:
    """Does each of their threads wait for something? Then they have done all that they were asked."""
    try:
        stats = [stat.read_text() for pid in pids for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread ends just now
    return bool(stats) and all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats)


def send(pids: Sequence[int], number: signal.Signals) -> None:
    """To processes that have ended: nothing."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def slowed(pids: Sequence[int]) -> AbstractContextManager[None]:
    """They get a small part of the time, until the block ends."""
    return in_short_turns(partial(send, pids, signal.SIGSTOP), partial(send, pids, signal.SIGCONT))
