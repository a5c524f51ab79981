"""`status`: the services of this machine, and what is registered in the whole system."""

import asyncio
import json
import time
from collections.abc import Sequence
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
from triptych_cli.commands.tables.compute_table import compute_table
from triptych_cli.commands.tables.instance_table import (
    can_serve,
    instance_table,
    read_records,
    unserved_lines,
)
from triptych_cli.commands.tables.transport_table import pairs_table
from triptych_cli.console import fail, out, plain_table
from triptych_cli.settings import CliSettings
from triptych_cli.supervisor.state import ServiceState, SystemStatus, read_status
from triptych_cli.supervisor.supervisor import is_supervised
from triptych_cli.system.layout import lasting_layout
from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.messages import InstanceRecord

STATE_COLOURS = {
    ServiceState.READY: "green",
    ServiceState.STARTING: "cyan",
    ServiceState.WAITING: "dim",
    ServiceState.BACKOFF: "yellow",
    ServiceState.STOPPING: "cyan",
    ServiceState.STOPPED: "dim",
}
NOTHING_RUNS = 3


def status(as_json: bool) -> int:
    """A table of the services; 0 when all are ready, 1 when not, 3 when nothing runs.

    Of a system that `up` has not started: what is registered; 0 when an instance serves requests, else 1.
    `as_json`: the same facts as one object.
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
    supervised = current is not None and is_supervised(layout)
    if current is not None and not supervised:
        fail("the supervisor was killed; ./triptych down clears what it left")
    records = _records() if current is None or supervised else None
    if as_json:
        _show_json(current, records)
    elif current is not None:
        _show_services(current)
    if not as_json and records is not None:
        _show_registered(records, with_instances=current is None)
    if current is None:
        return 0 if records is not None and can_serve(records) else 1
    return 0 if supervised and _is_ready(current) else 1


def _records() -> list[InstanceRecord] | None:
    """None: Redis cannot be reached, which has been told."""
    try:
        return asyncio.run(read_records())
    except (TriptychError, OSError) as error:
        fail(f"what is registered is not known: {error}")
        return None


def _is_ready(current: SystemStatus) -> bool:
    return all(service.state is ServiceState.READY for service in current.services)


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
            escape(service.detail),
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


def _show_registered(records: Sequence[InstanceRecord], *, with_instances: bool) -> None:
    if is_spread(records):
        out.print(hosts_table(hosts_of(records)))
        if links := links_of(records):
            out.print(links_table(links))
    if with_instances or is_spread(records):
        out.print(instance_table(records))
    out.print(compute_table(records))
    for line in unserved_lines(records):
        out.print(f"[yellow]{escape(line)}[/]")
    try:
        out.print(asyncio.run(pairs_table()))
    except (TriptychError, OSError) as error:
        out.print(f"[dim]transports are not known: {escape(str(error))}[/]")


def _show_json(current: SystemStatus | None, records: Sequence[InstanceRecord] | None) -> None:
    """Without URLs of Redis: they can hold a password."""
    shown: dict[str, Any] = {"services": []}
    if current is not None:
        fields = {"endpoint", "deployment", "model", "host", "services"}
        shown = current.model_dump(mode="json", include=fields)
    _print_json({**shown, **(as_json(records) if records is not None else {"hosts": None, "links": None})})


def _print_json(value: object) -> None:
    out.print(json.dumps(value, indent=2), markup=False, soft_wrap=True)
