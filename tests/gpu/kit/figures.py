"""Times of spans, out of the traces that a run kept (`TRIPTYCH_TEST_KEEP`), as JSON.

    python -m tests.gpu.kit.figures FOLDER

For each system, span and transport: how many there are, and their median and longest milliseconds.
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from triptych_common.telemetry import trace_reader

Summary = dict[str, float]


def summaries(traces_dir: Path) -> dict[str, Summary]:
    """Return a summary by span name and transport, of all spans in a folder."""
    times: dict[str, list[float]] = defaultdict(list)
    for span in trace_reader._spans(traces_dir, needle=""):
        transport = span.attributes.get("triptych.transport")
        times[span.name if transport is None else f"{span.name} {transport}"].append(span.duration_ms)
    return {
        name: {
            "count": len(found),
            "median_ms": round(statistics.median(found), 3),
            "longest_ms": round(max(found), 3),
        }
        for name, found in sorted(times.items())
    }


def main() -> int:
    kept = Path(sys.argv[1])
    folders = sorted(path for path in kept.rglob("traces") if path.is_dir())
    print(json.dumps({str(each.relative_to(kept)): summaries(each) for each in folders}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
