"""The tables of `serve`, as Markdown. Pure."""

from collections.abc import Sequence
from typing import Any

from comparison.report import number, table

from serving.load_points import LoadPoint
from serving.stage_times import StageTime

COLUMNS = (
    ("requests/s", "request_throughput"), ("good/s", "request_goodput"), ("tokens/s", "output_throughput"),
    ("TTFT p50", "median_ttft_ms"), ("p99", "p99_ttft_ms"), ("TPOT p50", "median_tpot_ms"),
    ("ITL p50", "median_itl_ms"), ("p99", "p99_itl_ms"), ("p99.9", "p99.9_itl_ms"),
    ("e2e p50", "median_e2el_ms"), ("p99", "p99_e2el_ms"),
)  # fmt: skip


def longest_stall_ms(figures: dict[str, Any]) -> float:
    """NaN where no request had two tokens."""
    gaps = [gap for gaps in figures.get("itls", ()) for gap in gaps]
    return max(gaps) * 1e3 if gaps else float("nan")


def points_table(results: Sequence[tuple[LoadPoint, dict[str, Any]]]) -> str:
    """One row for each load point; times in ms."""
    rows = []
    for point, figures in results:
        cells = [_cell(figures.get(key)) for _, key in COLUMNS]
        failed = sum(bool(error) for error in figures.get("errors", ()))
        rows.append([point.title, *cells, number(longest_stall_ms(figures)), str(failed)])
    return table(["load", *(title for title, _ in COLUMNS), "stall", "failed"], rows)


def _cell(value: Any) -> str:
    return "–" if value is None else number(float(value))


def stages_table(stages: Sequence[StageTime]) -> str:
    rows = [
        [each.name, str(each.count), number(each.p50_ms), number(each.p99_ms), number(each.total_s)]
        for each in stages
    ]
    return table(["stage", "number", "p50 ms", "p99 ms", "all, s"], rows)
