"""`restart`, `stop` and `scale`: services of the running system."""

import time
from typing import Literal

from triptych_cli.console import fail, out
from triptych_cli.roles import Bounds, is_named
from triptych_cli.settings import CliSettings
from triptych_cli.supervisor.control import request_services
from triptych_cli.supervisor.state import NOTHING_RUNS, SystemStatus, read_status
from triptych_cli.supervisor.supervisor import is_supervised
from triptych_cli.system.layout import RunLayout, lasting_layout


def restart(wanted: list[str]) -> int:
    """Restart services one after the other; 0 if all are ready again, 1 if not, 3 if nothing runs."""
    return _change("restart", wanted)


def stop(wanted: list[str]) -> int:
    """Stop instances; 0 if they have ended, 1 if not, 3 if nothing runs."""
    return _change("stop", wanted)


def _change(command: Literal["restart", "stop"], wanted: list[str]) -> int:
    found = running_system()
    if found is None:
        return NOTHING_RUNS
    layout, status = found
    try:
        names = chosen(status, wanted)
    except ValueError as error:
        fail(str(error))
        return 1
    if command == "stop" and (needed := _needed_by_all(status, names)):
        fail(f"all other services need {needed}; ./triptych down ends the whole system")
        return 1
    return _follow(layout, command, names)


def scale(stage: str, bounds: Bounds) -> int:
    """Set how many instances of `stage` run; 0 if they do, 1 if not, 3 if nothing runs."""
    found = running_system()
    if found is None:
        return NOTHING_RUNS
    layout, status = found
    stages = sorted({each.stage for each in status.services if each.stage})
    if stage not in stages:
        fail(f"there is no stage {stage}; there are: {', '.join(stages)}")
        return 1
    return _follow(layout, "scale", (stage,), bounds)


def running_system() -> tuple[RunLayout, SystemStatus] | None:
    """Return the layout and status of the running system; None, which is printed, if nothing runs."""
    layout = lasting_layout(CliSettings())
    status = read_status(layout.state_file)
    if status is None or not is_supervised(layout):
        fail("nothing is running; start it with ./triptych up")
        return None
    return layout, status


def chosen(status: SystemStatus, wanted: list[str]) -> tuple[str, ...]:
    """Instances to restart or stop; by default all but redis, which would lose its contents.

    Those that stand by are left out, unless they are named.

    Raises:
        ValueError: a name that is none.
    """
    known = [service.name for service in status.services]
    names: set[str] = set()
    for each in wanted:
        matches = [name for name in known if is_named(name, each)]
        if not matches:
            raise ValueError(f"there is no service {each}; there are: {', '.join(known)}")
        names.update(matches)
    away = {each.name for each in status.services if each.stands_by} - set(wanted)
    return tuple(
        name for name in known if (name in names if wanted else name != "redis") and name not in away
    )


def _needed_by_all(status: SystemStatus, names: tuple[str, ...]) -> str | None:
    return next(
        (each.name for each in status.services if each.name in names and not each.is_registered), None
    )


def _follow(
    layout: RunLayout,
    command: Literal["restart", "scale", "stop"],
    services: tuple[str, ...],
    bounds: Bounds | None = None,
) -> int:
    is_restart, service, since = command == "restart", "", time.monotonic()
    try:
        with out.status("restarting ..." if is_restart else "waiting for the instances ...") as spinner:
            for report in request_services(layout.control_socket, command, services, bounds):
                if report.kind == "failed":
                    fail(report.message)
                    return 1
                if service:
                    out.print(
                        f"  [green]✓[/] {service:<18} ready again after {time.monotonic() - since:.1f} s"
                    )
                if report.kind == "done":
                    return 0
                if is_restart:
                    service, since = report.service, time.monotonic()
                    spinner.update(f"restarting {service} ...")
                else:
                    out.print(f"  {report.kind} {report.service}")
    except OSError as error:
        fail(f"the supervisor accepts no requests: {error.strerror}")
        return 1
    what = "services were restarted" if is_restart else "instances had changed"
    fail(f"the supervisor ended before all {what}")
    return 1
