"""Output on the terminal. The command line is the only package that prints, and it prints through here."""

import re
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from triptych_cli.supervisor.state import ServiceState, ServiceStatus, SystemStatus
from triptych_common.telemetry.span_records import SpanRecord
from triptych_common.telemetry.waterfall import render_waterfall

ERROR_LINE = re.compile(r"\b\w*(Error|Exception): ")
MAX_CAUSES = 5
LONGEST_LINE = 400

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def plain_table(*columns: str, right: Collection[str] = ()) -> Table:
    """Without lines; the columns of `right` are aligned there."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def format_bytes(num_bytes: int) -> str:
    """With a binary unit, e.g. `1.5 MiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def fail(message: str) -> None:
    err.print(f"[bold red]triptych:[/] {escape(message)}", soft_wrap=True)


def show_tail(file: Path, num_lines: int = 25) -> None:
    """The end of a service's log; before it the lines further up that name an error."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return
    causes = list(dict.fromkeys(line.strip() for line in lines[:-num_lines] if ERROR_LINE.search(line)))
    for title, chosen in (("errors in", causes[-MAX_CAUSES:]), ("end of", lines[-num_lines:])):
        if chosen:
            err.print(f"[dim]{title} {file}:[/]", soft_wrap=True)
            for line in chosen:
                err.print(f"  {shortened(line)}", markup=False, soft_wrap=True)


def shortened(line: str) -> str:
    """The beginning and the end of a long line: an exception in a JSON line has its cause last."""
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[: LONGEST_LINE // 3]} ... {line[-LONGEST_LINE * 2 // 3 :]}"


class StartProgress:
    """One line per service that is ready or failed; on a terminal also the services that are starting."""

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
                self._print_change(service)
        starting = [service.name for service in status.services if service.state is ServiceState.STARTING]
        self._spinner.update(f"starting {', '.join(starting)} ..." if starting else "...")

    def _print_change(self, service: ServiceStatus) -> None:
        match service.state:
            case ServiceState.STARTING:
                self._started_at[service.name] = time.monotonic()
            case ServiceState.READY:
                took_s = time.monotonic() - self._started_at.get(service.name, time.monotonic())
                out.print(f"  [green]✓[/] {service.name:<18} ready after {took_s:.1f} s")
            case ServiceState.BACKOFF:
                out.print(f"  [yellow]![/] {service.name:<18} {escape(service.detail)}")


def show_waterfall(spans: Sequence[SpanRecord]) -> None:
    """One line per stage, as wide as the terminal (a file gets 120 columns)."""
    width = min(out.width, 140) if out.is_terminal else 120
    out.print(render_waterfall(spans, width), markup=False, soft_wrap=True)
