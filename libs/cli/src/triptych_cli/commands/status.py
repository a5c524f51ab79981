"""`status`: the services of this machine, and all instances registered in the system."""

import asyncio
import json
import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

from rich.markup import escape

from triptych_cli.commands.hosts.host_report import (
    as_json,
    hosts_of,
    hosts_table,
    is_spread,
    links_of,
    links_table,
)
from triptych_cli.commands.status_tables import (
    can_serve,
    compute_table,
    instance_table,
    pairs_table,
    read_records,
    shortfalls,
)
from triptych_cli.console import fail, out, plain_table
from triptych_cli.settings import CliSettings
from triptych_cli.supervisor.control import answers_ping
from triptych_cli.supervisor.process import is_same_session, session_members
from triptych_cli.supervisor.state import NOTHING_RUNS, ServiceState, ServiceStatus, SystemStatus, read_status
from triptych_cli.supervisor.supervisor import is_supervised
from triptych_cli.system.layout import RunLayout, lasting_layout
from triptych_cli.system.preflight import known_config
from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.messages import InstanceRecord

STATE_COLOURS = {
    ServiceState.READY: "green",
    ServiceState.UNRESPONSIVE: "red",
    ServiceState.STARTING: "cyan",
    ServiceState.WAITING: "dim",
    ServiceState.BACKOFF: "yellow",
    ServiceState.STOPPING: "cyan",
    ServiceState.STOPPED: "dim",
}


def status(as_json: bool) -> int:
    """Print the services; 0 if all are ready and answer, 1 if not, 3 if nothing runs.

    The supervisor, Redis and the registry are asked, too: a living process need not answer. For a system that
    `up` has not started: the registered instances; 0 if one serves requests, else 1. `as_json` prints the
    same facts as one object.
    """
    settings = CliSettings()
    layout = lasting_layout(settings)
    current = read_status(layout.state_file)
    if current is None and settings.redis_url is None:
        if as_json:
            _print_json({"services": []})
        else:
            out.print("nothing is running")
        return NOTHING_RUNS
    supervised = current is not None and _is_supervised(layout, current)
    has_supervisor = current is not None and is_supervised(layout)
    records = read_registered() if current is None or has_supervisor else None
    if current is not None:
        current = _as_found(current, records, supervised=has_supervisor)
    if as_json:
        _show_json(current, records)
    elif current is not None:
        _show_services(current)
    if not as_json and (current is None or _is_ready(current)):
        show_shortfalls(current.model if current else "", records)
    if not as_json and records is not None:
        _show_registered(records, with_instances=current is None)
    if current is None:
        return 0 if records is not None and can_serve(records) else 1
    return 0 if supervised and records is not None and _is_ready(current) else 1


def _is_supervised(layout: RunLayout, current: SystemStatus) -> bool:
    """True if the supervisor answers; otherwise prints that it was killed, was stopped, or hangs."""
    if not is_supervised(layout):
        fail("the supervisor was killed; ./triptych down clears what it left")
        return False
    if layout.control_socket.exists() and not answers_ping(layout.control_socket):
        fail(
            f"the supervisor does not answer: process {current.supervisor_pid} was stopped (kill -CONT lets "
            "it go on), or hangs; services are not restarted meanwhile"
        )
        return False
    return True


def _as_found(
    current: SystemStatus, records: Sequence[InstanceRecord] | None, *, supervised: bool
) -> SystemStatus:
    """`current`, corrected by what is observed: ended processes, expired records, a silent Redis."""
    registered = None if records is None else {record.instance for record in records}
    found = tuple(_service_as_found(each, registered, supervised) for each in current.services)
    return current.model_copy(update={"services": found})


def _service_as_found(
    service: ServiceStatus, registered: Collection[str] | None, supervised: bool
) -> ServiceStatus:
    if not supervised and not _has_processes(service):
        changes = {"state": ServiceState.STOPPED, "pid": None, "detail": "ended with its supervisor"}
    elif service.state is ServiceState.READY and _is_silent(service, registered):
        changes = {"state": ServiceState.UNRESPONSIVE, "detail": "does not answer"}
    elif not supervised:
        changes = {"detail": "goes on without a supervisor"}
    else:
        return service
    return service.model_copy(update=changes)


def _is_silent(service: ServiceStatus, registered: Collection[str] | None) -> bool:
    if registered is None:  # it was Redis that gave no answer
        return service.name == "redis"
    return service.is_registered and service.name not in registered


def _has_processes(service: ServiceStatus) -> bool:
    pid = service.pid
    return pid is not None and is_same_session(pid, service.pid_started_at) and bool(session_members(pid))


def read_registered() -> list[InstanceRecord] | None:
    """Records of the registry; None if Redis is unreachable (already printed)."""
    try:
        return asyncio.run(read_records())
    except (TriptychError, OSError) as error:
        fail(f"what is registered is not known: {error}")
        return None


def show_shortfalls(model: str, records: Sequence[InstanceRecord] | None) -> None:
    """Print a line for each capability of the model that the system does not serve."""
    for line in shortfalls(records or (), known_config(model), CliSettings().transport):
        out.print(f"[yellow]![/] {escape(line)}", soft_wrap=True)


def _is_ready(current: SystemStatus) -> bool:
    return all(each.state is ServiceState.READY or each.stands_by for each in current.services)


def _show_services(current: SystemStatus) -> None:
    numbers = ("pid", "restarts", "for")
    table = plain_table("service", "state", *numbers, "", right=numbers)
    for service in current.services:
        lasted = timedelta(seconds=int(time.time() - service.since))
        table.add_row(
            service.name,
            f"[{STATE_COLOURS[service.state]}]{service.state}[/]",
            str(service.pid or ""),
            str(service.num_restarts),
            str(lasted),
            escape(_remark(service)),
        )
    out.print(table)
    where = current.endpoint or "no gateway here"
    out.print(f"[dim]{where}  model {escape(current.model)}  supervisor {current.supervisor_pid}[/]")
    scraped = [each for each in current.services if each.metrics_port is not None]
    if scraped:
        table = plain_table("metrics of", "for Prometheus")
        for each in scraped:
            table.add_row(each.name, f"http://{each.metrics_host}:{each.metrics_port}/metrics")
        out.print(table)


def _remark(service: ServiceStatus) -> str:
    if service.detail or service.last_end is None:
        return service.detail
    ago = timedelta(seconds=int(time.time() - service.last_end.at))
    return f"{ago} ago it {service.last_end.reason}"


def _show_registered(records: Sequence[InstanceRecord], *, with_instances: bool) -> None:
    if is_spread(records):
        out.print(hosts_table(hosts_of(records)))
        if links := links_of(records):
            out.print(links_table(links))
    if with_instances or is_spread(records):
        out.print(instance_table(records))
    out.print(compute_table(records))
    try:
        out.print(asyncio.run(pairs_table()))
    except (TriptychError, OSError) as error:
        out.print(f"[dim]transports are not known: {escape(str(error))}[/]")


def _show_json(current: SystemStatus | None, records: Sequence[InstanceRecord] | None) -> None:
    """Print JSON without URLs of Redis, which can hold a password."""
    shown: dict[str, Any] = {"services": []}
    if current is not None:
        fields = {"endpoint", "deployment", "model", "host", "services"}
        shown = current.model_dump(mode="json", include=fields)
    _print_json({**shown, **(as_json(records) if records is not None else {"hosts": None, "links": None})})


def _print_json(value: object) -> None:
    out.print(json.dumps(value, indent=2), markup=False, soft_wrap=True)
