"""`restart`: services of the running system, one after the other."""

import time
from collections.abc import Iterator

from triptych_cli.console import fail, out
from triptych_cli.roles import is_named
from triptych_cli.settings import CliSettings
from triptych_cli.supervisor.control import ServicesReport, request_services
from triptych_cli.supervisor.state import SystemStatus, read_status
from triptych_cli.supervisor.supervisor import is_supervised
from triptych_cli.system.layout import lasting_layout


def restart(wanted: list[str]) -> int:
    """Restart services; 0 if all are ready again, 1 if not, 3 if nothing runs."""
    layout = lasting_layout(CliSettings())
    status = read_status(layout.state_file)
    if status is None or not is_supervised(layout):
        fail("nothing is running; start it with ./triptych up")
        return 3
    try:
        services = chosen(status, wanted)
    except ValueError as error:
        fail(str(error))
        return 1
    try:
        return _follow(request_services(layout.control_socket, "restart", services))
    except OSError as error:
        fail(f"the supervisor accepts no requests: {error.strerror}")
        return 1


def chosen(status: SystemStatus, wanted: list[str]) -> tuple[str, ...]:
    """Instances to restart; by default all but redis, which would lose its contents.

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
    return tuple(name for name in known if (name in names if wanted else name != "redis"))


def _follow(reports: Iterator[ServicesReport]) -> int:
    service, since = "", time.monotonic()

    def show_ready() -> None:
        if service:
            out.print(f"  [green]✓[/] {service:<18} ready again after {time.monotonic() - since:.1f} s")

    with out.status("restarting ...") as spinner:
        for report in reports:
            if report.kind == "failed":
                fail(report.message)
                return 1
            show_ready()
            service, since = report.service, time.monotonic()
            spinner.update(f"restarting {service} ...")
            if report.kind == "done":
                return 0
    fail("the supervisor ended before all services were restarted")
    return 1
