"""Terminal output. The command line is the only package that prints, and it prints through here."""

import contextlib
import math
import re
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from triptych_cli.supervisor.state import ServiceState, ServiceStatus, SystemStatus
from triptych_cli.system.preflight import downloads_of
from triptych_common.telemetry.span_records import SpanRecord
from triptych_common.telemetry.waterfall import render_waterfall

ERROR_LINE = re.compile(r"\b\w*(Error|Exception): ")
MAX_CAUSES = 5
LONGEST_LINE = 400
KV_TOO_SMALL = re.compile(
    r"max seq len \((?P<wanted>\d+)\), \((?P<needed>[\d.]+) GiB KV cache is needed, which is larger than the "
    r"available KV cache memory \((?P<there>[\d.]+) GiB\)(.{0,80}maximum model length is (?P<fitting>\d+))?"
)
"""vLLM's message of `_check_enough_kv_cache_memory`."""

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def plain_table(*columns: str, right: Collection[str] = ()) -> Table:
    """Table without lines; the columns in `right` are aligned right."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def format_bytes(num_bytes: int) -> str:
    """Size with a binary unit, such as `1.5 MiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def fail(message: str) -> None:
    err.print(f"[bold red]triptych:[/] {escape(message)}", soft_wrap=True)


def show_tail(file: Path, num_lines: int = 25) -> None:
    """Print the end of a service's log, after earlier lines that name an error."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return
    lines = text.splitlines()
    causes = list(dict.fromkeys(line.strip() for line in lines[:-num_lines] if ERROR_LINE.search(line)))
    for title, chosen in (("errors in", causes[-MAX_CAUSES:]), ("end of", lines[-num_lines:])):
        if chosen:
            err.print(f"[dim]{title} {file}:[/]", soft_wrap=True)
            for line in chosen:
                err.print(f"  {shortened(line)}", markup=False, soft_wrap=True)
    if (remedy := remedy_of(text)) is not None:
        fail(remedy)


def remedy_of(log_text: str) -> str | None:
    """Advice after a start that failed for lack of KV cache memory; None for other failures."""
    found = KV_TOO_SMALL.search(log_text)
    if found is None:
        return None
    needed, fitting = found["needed"], found["fitting"]
    return (
        f"a context of {found['wanted']} tokens needs {needed} GiB of KV cache, and {found['there']} GiB are "
        f"there{f', enough for {fitting} tokens' if fitting else ''}: shorten the context with "
        f'--prefill-decode-args "--max-model-len {fitting or "TOKENS"}", or make room: on a CPU with '
        f"VLLM_CPU_KVCACHE_SPACE={math.ceil(float(needed))} (GiB, set before ./triptych), on a GPU with "
        '--prefill-decode-args "--gpu-memory-utilization 0.95"'
    )


def shortened(line: str) -> str:
    """Beginning and end of a long line: an exception in a JSON line has its cause last."""
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[: LONGEST_LINE // 3]} ... {line[-LONGEST_LINE * 2 // 3 :]}"


class Elapsed:
    """Spinner text with the elapsed seconds and the bytes downloaded meanwhile."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.downloads: Path | None = None  # a folder of the hub's cache, whose growth is shown
        self._started_at = time.monotonic()
        self._counted_at, self._first_bytes, self._num_bytes = float("-inf"), -1, 0

    def __rich__(self) -> str:
        now = time.monotonic()
        text = f"{self.text} {now - self._started_at:.0f} s"
        if self.downloads is not None and now - self._counted_at >= 1.0:
            self._counted_at, self._num_bytes = now, folder_bytes(self.downloads)
            if self._first_bytes < 0:
                self._first_bytes = self._num_bytes
        if self._num_bytes > self._first_bytes >= 0:
            text += f", {format_bytes(self._num_bytes)} of the model downloaded"
        return text


def folder_bytes(folder: Path) -> int:
    """Bytes on disk of the files in `folder`, unfinished downloads included; 0 without a folder."""
    total = 0
    for file in folder.glob("*"):
        with contextlib.suppress(OSError):  # a download was renamed just now
            total += file.stat().st_blocks * 512  # a file that is downloaded in parts has holes
    return total


class StartProgress:
    """Prints a line per service that is ready or failed; on a terminal also those starting."""

    def __init__(self) -> None:
        self._seen: dict[str, ServiceState] = {}
        self._started_at: dict[str, float] = {}
        self._text = Elapsed("starting ...")
        self._spinner = out.status(self._text)

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
        self._text.text = f"starting {', '.join(starting)} ..." if starting else "..."
        self._text.downloads = downloads_of(status.model)

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
    """Print one line per stage, as wide as the terminal (120 columns in a file)."""
    width = min(out.width, 140) if out.is_terminal else 120
    out.print(render_waterfall(spans, width), markup=False, soft_wrap=True)
