"""Budget of open files of this process: sockets are files.

    limit = 2 for each request in flight | idle connections | connections accepted at once | others

Callers need no key to open connections. Where the limit is too low for all of it, idle connections get less:
the rest is kept for requests, encoders, Redis and health checks.
"""

import resource
from dataclasses import dataclass
from typing import Protocol

from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

PER_REQUEST = 2  # its caller's connection, and the one to its prefill_decode
OTHERS = 256  # encoders' connections, Redis', media servers', files, the program itself
BACKLOG = 2048  # connections that the event loop accepts before any of them is counted: uvicorn's default
MIN_IDLE = 16
IDLE_SHARE = 0.75  # of what is left of the limit; the rest is for connections accepted at once


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_idle: int
    backlog: int = BACKLOG


def allow_open_files(max_requests: int, max_idle: int) -> ConnectionLimits:
    """Raise this process's limit as far as the system allows, and return the connections that fit."""
    needed = PER_REQUEST * max_requests + OTHERS + max_idle + BACKLOG
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ConnectionLimits(max_idle)
    limit = max(soft, needed) if hard == resource.RLIM_INFINITY else hard
    if limit != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit >= needed:
        return ConnectionLimits(max_idle)
    left = limit - PER_REQUEST * max_requests - OTHERS
    fitting = max(MIN_IDLE, min(max_idle, int(left * IDLE_SHARE)))
    log.warning("too few files may be open", limit=limit, needed=needed, max_idle_connections=fitting)
    return ConnectionLimits(fitting, min(BACKLOG, max(MIN_IDLE, left - fitting)))


class IdleConnection(Protocol):
    """Connection without a request that is being answered."""

    def close_idle(self) -> None:
        """Close the idle connection at once."""


class IdleConnections:
    """Idle connections of one listener; beyond `max_idle` the oldest is closed.

    Connections that have had an answer are kept apart from those that no request has come on. The larger
    group gives way, so a flood of connections of one kind ends connections of that kind.
    """

    def __init__(self, max_idle: float) -> None:
        self._max_idle = max_idle
        self._new: dict[IdleConnection, None] = {}  # the oldest first
        self._kept: dict[IdleConnection, None] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._kept)

    def add(self, connection: IdleConnection, *, has_answered: bool) -> None:
        group = self._kept if has_answered else self._new
        group[connection] = None
        if len(self) > self._max_idle:
            larger = self._new if len(self._new) > len(self._kept) else self._kept
            oldest = next(iter(larger))
            del larger[oldest]
            oldest.close_idle()

    def discard(self, connection: IdleConnection) -> None:
        self._new.pop(connection, None)
        self._kept.pop(connection, None)
