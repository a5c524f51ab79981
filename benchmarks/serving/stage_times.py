"""Times of each stage during a load, from the trace files of the system that served it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from load.figures import percentile

from triptych_common.telemetry.span_records import SpanRecord
from triptych_common.telemetry.trace_files import trace_files


@dataclass(frozen=True)
class StageTime:
    """Times of all spans of one name that began during the load."""

    name: str
    count: int
    p50_ms: float
    p99_ms: float
    total_s: float

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def spans_between(traces_dir: Path, start_ns: int, end_ns: int) -> Iterator[SpanRecord]:
    """Spans that began in this time (wall clock), once each; incomplete lines are skipped."""
    seen: set[str] = set()
    for path in trace_files(traces_dir):
        try:
            file = path.open("rb")
        except FileNotFoundError:  # not moved aside yet, or removed meanwhile
            continue
        with file:
            for line in file:
                if not line.endswith(b"\n"):
                    continue
                span = SpanRecord(**orjson.loads(line))
                if start_ns <= span.start_ns < end_ns and span.span_id not in seen:
                    seen.add(span.span_id)
                    yield span


def stage_times(spans: Iterable[SpanRecord]) -> list[StageTime]:
    """Times by span name, in the order of their first beginnings."""
    durations: defaultdict[str, list[float]] = defaultdict(list)
    for span in sorted(spans, key=lambda each: each.start_ns):
        durations[span.name].append(span.duration_ms)
    return [
        StageTime(name, len(found), percentile(found, 0.5), percentile(found, 0.99), sum(found) / 1e3)
        for name, found in durations.items()
    ]
