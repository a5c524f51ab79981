"""Spans as JSON lines in a file per process, for a machine without a trace backend.

The files (0600) are append only; a reader copes with a last line that is not complete yet.
"""

import os
import re
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

AttributeValue = str | bool | int | float | list[str]


@dataclass(frozen=True)
class SpanRecord:
    """One finished span."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    parent_id: str | None
    name: str
    start_ns: int  # wall clock, nanoseconds since the epoch
    end_ns: int
    status: str  # "unset", "ok" or "error"
    service: str
    instance: str
    attributes: dict[str, AttributeValue]

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class FileSpanExporter(SpanExporter):
    """Appends each batch with one write to `traces_dir/{service}-{pid}.jsonl`.

    The pid is read at each export, so a forked process gets a file of its own.
    """

    def __init__(self, traces_dir: Path, service: str, instance: str) -> None:
        self._traces_dir = traces_dir
        self._service = service
        self._instance = instance
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._fd_pid = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = b"".join(
            orjson.dumps(asdict(_record(span, self._service, self._instance)), default=str) + b"\n"
            for span in spans
        )
        with self._lock:
            try:
                _write_all(self._file(), lines)
            except OSError:
                return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        with self._lock:
            if self._fd is not None and self._fd_pid == os.getpid():
                os.close(self._fd)
            self._fd = None

    def _file(self) -> int:
        pid = os.getpid()
        if self._fd is None or self._fd_pid != pid:
            self._traces_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            name = re.sub(r"[^A-Za-z0-9._-]", "_", self._service)
            path = self._traces_dir / f"{name}-{pid}.jsonl"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags, 0o600)
            self._fd_pid = pid
        return self._fd


def _record(span: ReadableSpan, service: str, instance: str) -> SpanRecord:
    context = span.context
    if context is None:
        raise ValueError(f"span {span.name} has no context")
    return SpanRecord(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=None if span.parent is None else f"{span.parent.span_id:016x}",
        name=span.name,
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0,
        status=span.status.status_code.name.lower(),
        service=service,
        instance=instance,
        attributes={key: _plain(value) for key, value in (span.attributes or {}).items()},
    )


def _plain(value: object) -> AttributeValue:
    """Sequences come as tuples; OpenTelemetry also allows nested values, which we never set."""
    if isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Sequence):
        return [str(each) for each in value]
    return str(value)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
