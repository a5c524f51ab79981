"""Reader of the traces that `FileSpanExporter` wrote."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import orjson

from triptych_common.telemetry.span_records import REQUEST_ID, LostSpans, SpanRecord
from triptych_common.telemetry.trace_files import trace_files

Record = TypeVar("Record", SpanRecord, LostSpans)


def read_trace(traces_dir: Path, request_id: str) -> list[SpanRecord]:
    """Return every span of the trace of `request_id`, by start time, or none.

    Spans reach the files with a delay (`tracing.EXPORT_DELAY_MS`), each when it has ended. A caller's trace
    can hold several requests: spans of the others are left out.
    """
    candidates = _spans(traces_dir, request_id)
    marked = [span for span in candidates if span.attributes.get(REQUEST_ID) == request_id]
    if not marked:
        return []
    trace_id = min(marked, key=lambda span: span.start_ns).trace_id
    spans = {span.span_id: span for span in _spans(traces_dir, trace_id) if span.trace_id == trace_id}
    of_others = {
        span.span_id for span in spans.values() if span.is_root and span.attributes[REQUEST_ID] != request_id
    }
    own = [span for span in spans.values() if not _is_below(span, of_others, spans)]
    return sorted(own, key=lambda span: (span.start_ns, -span.end_ns))


def read_lost(traces_dir: Path) -> list[LostSpans]:
    """Return spans that processes could not write, by time, but for processes that never wrote again."""
    lost = _records(traces_dir, "num_lost", LostSpans)
    return sorted(lost, key=lambda each: each.start_ns)


def _is_below(span: SpanRecord, roots: set[str], spans: dict[str, SpanRecord]) -> bool:
    seen: set[str] = set()  # files may hold anything
    at: SpanRecord | None = span
    while at is not None and at.span_id not in seen:
        if at.span_id in roots:
            return True
        seen.add(at.span_id)
        at = spans.get(at.parent_id or "")
    return False


def _spans(traces_dir: Path, needle: str) -> Iterator[SpanRecord]:
    return _records(traces_dir, needle, SpanRecord)


def _records(traces_dir: Path, needle: str, kind: type[Record]) -> Iterator[Record]:
    """Yield records of `kind` whose line contains `needle`; incomplete and foreign lines are skipped."""
    wanted = needle.encode()
    for path in trace_files(traces_dir):
        try:
            file = path.open("rb")
        except FileNotFoundError:  # moved aside or removed meanwhile
            continue
        with file:
            for line in file:
                if wanted in line and line.endswith(b"\n"):
                    try:
                        yield kind(**orjson.loads(line))
                    except (orjson.JSONDecodeError, TypeError):
                        continue
