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
    """Do all of their threads wait for something, at one and the same time? Then each has handed on what it
    was asked for, and whoever got it, if it is one of them, is done with it.

    Threads are looked at one after another. That none has run meanwhile is seen by the second look.
    """
    before, after = _switches_of_sleepers(pids), _switches_of_sleepers(pids)
    return before is not None and before == after


def _switches_of_sleepers(pids: Sequence[int]) -> dict[str, int] | None:
    """How often each thread has left a core; none if one of them is awake, or ends just now."""
    counts = {}
    try:
        for pid in pids:
            for status in Path(f"/proc/{pid}/task").glob("*/status"):
                fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
                if not fields["State"].strip().startswith("S"):
                    return None
                counts[str(status)] = int(fields["voluntary_ctxt_switches"])
    except (FileNotFoundError, ProcessLookupError):
        return None
    return counts or None


def send(pids: Sequence[int], number: signal.Signals) -> None:
    """To processes that have ended: nothing."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def slowed(pids: Sequence[int]) -> AbstractContextManager[None]:
    """They get a small part of the time, until the block ends."""
    return in_short_turns(partial(send, pids, signal.SIGSTOP), partial(send, pids, signal.SIGCONT))
