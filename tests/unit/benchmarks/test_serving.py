"""Load points, replays, stages, plots and grids: no server, no vLLM."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from load.contents import TextMaker
from serving.load_points import LoadPoint, Loop
from serving.replay import Arrival, messages, read_arrivals
from serving.serve_report import longest_stall_ms, points_table, stages_table
from serving.stage_times import spans_between, stage_times
from tuning.grid import Setup, survivors

from triptych_common.telemetry.span_records import SpanRecord

MODEL = Path(__file__).resolve().parents[3] / "models" / "digits-vl"
FIGURES = {
    "request_throughput": 2.0, "median_ttft_ms": 100.0, "p99_ttft_ms": 300.0, "median_tpot_ms": 10.0,
    "p99_itl_ms": 40.0, "itls": [[0.01, 0.2], [0.02]], "ttfts": [0.1, 0.3], "start_times": [5.0, 5.5],
    "errors": ["", ""],
}  # fmt: skip


def rate(value: float) -> LoadPoint:
    return LoadPoint(Loop.OPEN, request_rate=value)


# ---- replay --------------------------------------------------------------------------------------
def write_lines(folder: Path, *lines: object) -> Path:
    path = folder / "arrivals.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_arrivals_are_read_in_order(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path,
        {"at_s": 0, "text_tokens": 5, "output_tokens": 2},
        "",
        {"at_s": 1.5, "text_tokens": 7, "output_tokens": 3, "images": ["logo", [56, 28]]},
    )
    assert read_arrivals(path) == [Arrival(0.0, 5, 2), Arrival(1.5, 7, 3, ("logo", (56, 28)))]


def test_a_named_image_is_the_same_and_a_size_is_new() -> None:
    texts = TextMaker(MODEL)
    arrivals = [Arrival(0.0, 5, 2, ("logo", (28, 28))), Arrival(1.0, 5, 2, ("logo", (28, 28)))]
    (_, one), (_, other) = messages(arrivals, texts, 1)
    first, second = one[0]["content"], other[0]["content"]
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert [part["type"] for part in first] == ["image_url", "image_url", "text"]
    assert next(messages(arrivals, texts, 1))[1] == one


# ---- stages --------------------------------------------------------------------------------------
def span(name: str, start_ms: int, took_ms: int) -> SpanRecord:
    start = start_ms * 1_000_000
    return SpanRecord(
        "a", name, None, name, start, start + took_ms * 1_000_000, "ok", "encoder", "encoder-0", {}
    )


def test_stages_are_named_in_the_order_of_their_beginnings() -> None:
    found = stage_times(
        [span("encoder.encode", 5, 100), span("gateway.media", 1, 2), span("encoder.encode", 9, 300)]
    )
    assert [(each.name, each.count, each.p50_ms, each.p99_ms) for each in found] == [
        ("gateway.media", 1, 2.0, 2.0),
        ("encoder.encode", 2, 100.0, 300.0),
    ]
    assert "encoder.encode" in stages_table(found)


def test_spans_of_other_times_are_left_out(tmp_path: Path) -> None:
    lines = [json.dumps(asdict(span(name, at, 1))) for name, at in (("before", 1), ("in", 5), ("after", 9))]
    (tmp_path / "encoder-1.jsonl").write_text("\n".join(lines) + '\n{"cut off')
    found = [each.name for each in spans_between(tmp_path, 4_000_000, 9_000_000)]
    assert found == ["in"]


# ---- tables and plots ----------------------------------------------------------------------------
def test_a_point_is_a_row_with_its_longest_stall() -> None:
    assert longest_stall_ms(FIGURES) == pytest.approx(200)
    text = points_table([(rate(2.0), FIGURES)])
    assert "2/s, Poisson" in text
    assert "200.0" in text
    assert longest_stall_ms({}) != longest_stall_ms({})


# ---- tune ----------------------------------------------------------------------------------------


def test_the_better_half_goes_on_and_the_failed_never() -> None:
    one, two, three, failed = (Setup(count, ()) for count in (1, 2, 3, 4))
    goodput = {one: 1.0, two: 3.0, three: 2.0, failed: float("nan")}
    assert survivors(goodput) == [two]
    assert survivors({one: 1.0, two: 3.0, three: 2.0, Setup(5, ()): 4.0}) == [Setup(5, ()), two]
    assert survivors({failed: float("nan")}) == []
