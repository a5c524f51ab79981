"""What people see. The only package of Triptych that prints, and it prints through here."""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from triptych_cli.supervisor.state import ServiceState, ServiceStatus, SystemStatus
from triptych_common.telemetry.tracefile import SpanRecord
from triptych_common.telemetry.waterfall import render_waterfall

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def fail(message: str) -> None:
    err.print(f"[bold red]triptych:[/] {escape(message)}")


def tail(file: Path, num_lines: int) -> list[str]:
    """The last lines of a text file; empty when it is not there."""
    try:
        with file.open(errors="replace") as handle:
            return [line.rstrip("\n") for line in deque(handle, num_lines)]
    except OSError:
        return []


def show_tail(file: Path, num_lines: int = 30) -> None:
    """The end of a service's log, as it is."""
    lines = tail(file, num_lines)
    err.print(f"[dim]last {len(lines)} lines of {file}:[/]", soft_wrap=True)
    for line in lines:
        err.print(f"  {line}", markup=False, soft_wrap=True)


class StartProgress:
    """One line per service when it is ready or in trouble; on a terminal also who is being waited for."""

    def __init__(self) -> None:
        self._seen: dict[str, ServiceState] = {}
        self._started_at: dict[str, float] = {}
        self._spinner = out.status("starting ...")

    def __enter__(self) -> "StartProgress":
        self._spinner.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._spinner.stop()

    def update(self, status: SystemStatus) -> None:
        for service in status.services:
            if self._seen.get(service.name) != service.state:
                self._seen[service.name] = service.state
                self._tell(service)
        starting = [service.name for service in status.services if service.state is ServiceState.STARTING]
        self._spinner.update(f"starting {', '.join(starting)} ..." if starting else "...")

    def _tell(self, service: ServiceStatus) -> None:
        match service.state:
            case ServiceState.STARTING:
                self._started_at[service.name] = time.monotonic()
            case ServiceState.READY:
                took_s = time.monotonic() - self._started_at.get(service.name, time.monotonic())
                out.print(f"  [green]✓[/] {service.name:<18} ready after {took_s:.1f} s")
            case ServiceState.BACKOFF:
                out.print(f"  [yellow]![/] {service.name:<18} {escape(service.detail)}")
            case _:
                pass


def show_waterfall(spans: Sequence[SpanRecord]) -> None:
    """One line per stage, as wide as the terminal (a file gets 120 columns)."""
    width = min(out.width, 140) if out.is_terminal else 120
    out.print(render_waterfall(spans, width), markup=False, soft_wrap=True)
