"""Spans as JSON lines in a file per process, for a machine without a trace backend.

The files (0600) are append only; a reader copes with a last line that is not complete yet.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from triptych_common.telemetry.logs import get_logger
from triptych_common.telemetry.trace_files import TraceFile

log = get_logger(__name__)

AttributeValue = str | bool | int | float | list[str]

INSTANCE = "triptych.instance"
REQUEST_ID = "triptych.request_id"
STAGE_PREFIX, STAGE_SUFFIX = "triptych.ttft.", "_ms"  # of a request's span: the time to first token by stage


@dataclass(frozen=True)
class SpanRecord:
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
    kind: str = "internal"  # "server": of a request that came from outside

    @property
    def is_root(self) -> bool:
        """True for the gateway's span of a whole request; its name contains the model's."""
        return self.kind == "server" and REQUEST_ID in self.attributes

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


@dataclass
class LostSpans:
    """Line between a process's spans that marks spans lost before it."""

    num_lost: int
    start_ns: int  # of the first one; wall clock, as in `SpanRecord`
    end_ns: int  # of the last one
    service: str
    instance: str
    error: str  # why the first one could not


class FileSpanExporter(SpanExporter):
    """Appends each batch with one write to this process's file in `traces_dir` (`trace_files`).

    A batch that cannot be written is lost: a full disk must not become full memory. The log has the first
    one, and the file has `LostSpans` as soon as it can be written again.
    The pid is read at each export, so a forked process gets a file of its own.
    """

    def __init__(self, traces_dir: Path, service: str, instance: str, max_bytes: int, max_age_s: int) -> None:
        self._traces_dir = traces_dir
        self._service = service
        self._instance = instance
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._file: TraceFile | None = None
        self._lost: LostSpans | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        records = [_record(span, self._service, self._instance) for span in spans]
        with self._lock:
            told = [self._lost] if self._lost is not None else []
            lines = b"".join(orjson.dumps(each, default=str) + b"\n" for each in (*told, *records))
            try:
                self._own_file().append(lines)
            except OSError as error:
                self._lose(records, error)
                return SpanExportResult.FAILURE
            if self._lost is not None:
                log.info("spans are written again", num_lost=self._lost.num_lost)
                self._lost = None
        return SpanExportResult.SUCCESS

    def _lose(self, records: Sequence[SpanRecord], error: OSError) -> None:
        if self._lost is None:
            log.warning("spans not written, they are lost", folder=str(self._traces_dir), error=str(error))
            start_ns = min((each.start_ns for each in records), default=0)
            self._lost = LostSpans(0, start_ns, start_ns, self._service, self._instance, str(error))
        self._lost.num_lost += len(records)
        self._lost.end_ns = max((each.end_ns for each in records), default=self._lost.end_ns)

    def shutdown(self) -> None:
        with self._lock:
            if self._file is not None and self._file.pid == os.getpid():
                self._file.close()
            self._file = None

    def _own_file(self) -> TraceFile:
        if self._file is None or self._file.pid != os.getpid():
            self._file = TraceFile(
                self._traces_dir, self._service, self._max_bytes, max_age_s=self._max_age_s
            )
        return self._file


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
        kind=span.kind.name.lower(),
    )


def _plain(value: object) -> AttributeValue:
    """Convert sequences, which come as tuples; OpenTelemetry's nested values are never set here."""
    if isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Sequence):
        return [str(each) for each in value]
    return str(value)
