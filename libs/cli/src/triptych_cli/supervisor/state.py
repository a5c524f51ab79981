"""States of a service, and the state file, which `status`, `down` and the next start read.

WAITING --dependencies ready--> STARTING --condition met--> READY
                                 |    ^                       |
                          failed |    | delay over     exited |
                                 v    |                       |
                                BACKOFF <---------------------'
READY --no answer--> UNRESPONSIVE --answers--> READY        UNRESPONSIVE --exited, hangs--> BACKOFF
READY, UNRESPONSIVE --restart--> STOPPING --gone--> STARTING
STARTING, READY, UNRESPONSIVE --stop--> STOPPING --gone--> STOPPED
WAITING, BACKOFF --stop--> STOPPED <--first start failed-- WAITING, STARTING
WAITING, BACKOFF --kill_now during a start--> STOPPING
READY, UNRESPONSIVE --kill_now after a crash--> STOPPED
"""

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)


class ServiceState(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    UNRESPONSIVE = "unresponsive"  # was ready, and does not answer
    BACKOFF = "backoff"
    STOPPING = "stopping"
    STOPPED = "stopped"


ALLOWED: Mapping[ServiceState, frozenset[ServiceState]] = {
    ServiceState.WAITING: frozenset({ServiceState.STARTING, ServiceState.STOPPING, ServiceState.STOPPED}),
    ServiceState.STARTING: frozenset(
        {ServiceState.READY, ServiceState.BACKOFF, ServiceState.STOPPING, ServiceState.STOPPED}
    ),
    ServiceState.READY: frozenset(
        {ServiceState.UNRESPONSIVE, ServiceState.BACKOFF, ServiceState.STOPPING, ServiceState.STOPPED}
    ),
    ServiceState.UNRESPONSIVE: frozenset(
        {ServiceState.READY, ServiceState.BACKOFF, ServiceState.STOPPING, ServiceState.STOPPED}
    ),
    # To itself: the program could not be executed, again.
    ServiceState.BACKOFF: frozenset(
        {ServiceState.STARTING, ServiceState.BACKOFF, ServiceState.STOPPING, ServiceState.STOPPED}
    ),
    # To itself: a stop during a restart.
    ServiceState.STOPPING: frozenset(
        {ServiceState.STARTING, ServiceState.BACKOFF, ServiceState.STOPPING, ServiceState.STOPPED}
    ),
    # To itself: the stop of a service whose first start failed.
    ServiceState.STOPPED: frozenset({ServiceState.STOPPED}),
}


STANDS_BY = "stands by"  # detail of a service that is started when there is work for it
RUNNING = frozenset({ServiceState.READY, ServiceState.UNRESPONSIVE})
NOTHING_RUNS = 3
"""Exit code of a command that found no system."""


class LastEnd(BaseModel):
    """Last end of a service's process, except by `down`."""

    model_config = ConfigDict(frozen=True)

    at: float  # Unix seconds
    reason: str


class ServiceStatus(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    state: ServiceState
    pid: int | None = None  # leader of the service's session
    pid_started_at: float | None = None  # Unix seconds; distinguishes the pid from a later one
    num_restarts: int = 0
    since: float  # Unix seconds of the last change of state
    detail: str = ""  # why it is not ready
    last_end: LastEnd | None = None
    log_file: str
    is_registered: bool = False  # once ready it has a record in the registry, under its name
    metrics_port: int | None = None  # None: none are answered
    metrics_host: str = "127.0.0.1"
    stage: str = ""  # of an engine, by which it is scaled; empty: no engine

    @property
    def stands_by(self) -> bool:
        """True if it is stopped until there is work for it."""
        return self.state is ServiceState.STOPPED and self.detail == STANDS_BY


class HostStatus(BaseModel):
    """Facts of this machine as one of several hosts."""

    model_config = ConfigDict(frozen=True)

    name: str
    store: str
    agent: str  # instance
    join_dir: str  # what other hosts need in order to join
    key_file: str | None  # shared by all agents; None: certificates only
    runs_redis: bool  # the system's


class SystemStatus(BaseModel):
    model_config = ConfigDict(frozen=True)

    supervisor_pid: int
    endpoint: str
    redis_url: str
    deployment: str
    store_socket: str
    traces_dir: str
    model: str
    host: HostStatus | None = None  # one of several; None: there is one
    services: tuple[ServiceStatus, ...]


def write_status(file: Path, status: SystemStatus) -> None:
    """Write atomically, readable by the owner only (a Redis URL can hold a password)."""
    temporary = file.with_suffix(".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as handle:
        handle.write(status.model_dump_json())
    temporary.replace(file)


def try_write_status(file: Path, status: SystemStatus) -> None:
    """Write the status; a failure is logged, because the system matters more than the file."""
    try:
        write_status(file, status)
    except OSError as error:  # for one, the run directory's tmpfs is full
        log.warning("state file not written, it keeps the previous state", error=str(error))


def read_status(file: Path) -> SystemStatus | None:
    """Status from the file; None if nothing was started here."""
    try:
        return SystemStatus.model_validate_json(file.read_text())
    except (OSError, ValidationError):
        return None
