"""`trace REQUEST_ID`: draws the stages of one request."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from triptych_cli.commands.clients import traces_folder
from triptych_cli.console import fail, out, show_waterfall
from triptych_common.telemetry.span_records import SpanRecord
from triptych_common.telemetry.trace_reader import read_lost, read_trace
from triptych_common.telemetry.waterfall import first_token_stages

FULL_BYTES = 64 << 10  # a batch of spans may need as much


def trace(request_id: str) -> int:
    """Draw the request's trace, even after the system has been stopped."""
    traces_dir = traces_folder()
    spans = read_trace(traces_dir, request_id)
    if spans:
        show_waterfall(spans)
        if stages := first_token_stages(spans):
            out.print(stages, markup=False, highlight=False)
    else:
        fail(
            f"no trace of {request_id} in {traces_dir} (spans arrive a moment after the answer; not every"
            " request leaves any where OTEL_TRACES_SAMPLER says so)"
        )
    for loss in losses(traces_dir, spans):
        fail(loss)
    return 0 if spans else 1


def losses(traces_dir: Path, spans: Sequence[SpanRecord]) -> list[str]:
    """Lines about lost spans that may explain gaps in `spans`, or all losses if `spans` is empty."""
    found = [
        f"{each.num_lost} spans of {each.instance} are lost, from {_clock(each.start_ns)} to"
        f" {_clock(each.end_ns)}: {each.error}"
        for each in read_lost(traces_dir)
        if not spans
        or (each.start_ns <= max(span.end_ns for span in spans) and each.end_ns >= spans[0].start_ns)
    ]
    if traces_dir.is_dir() and shutil.disk_usage(traces_dir).free < FULL_BYTES:
        found.append(f"the disk of {traces_dir} is full: spans are being lost until there is space")
    return found


def _clock(ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ns / 1e9))
