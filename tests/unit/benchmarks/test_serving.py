"""Load points, replays, stages, plots and grids: no server, no vLLM."""

import json
from dataclasses import asdict
from pathlib import Path

from load.contents import TextMaker
from serving.replay import Arrival, messages
from serving.stage_times import spans_between

from triptych_common.telemetry.span_records import SpanRecord

MODEL = Path(__file__).resolve().parents[3] / "models" / "digits-vl"


# ---- replay --------------------------------------------------------------------------------------
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


def test_spans_of_other_times_are_left_out(tmp_path: Path) -> None:
    lines = [json.dumps(asdict(span(name, at, 1))) for name, at in (("before", 1), ("in", 5), ("after", 9))]
    (tmp_path / "encoder-1.jsonl").write_text("\n".join(lines) + '\n{"cut off')
    found = [each.name for each in spans_between(tmp_path, 4_000_000, 9_000_000)]
    assert found == ["in"]


# ---- tables and plots ----------------------------------------------------------------------------
# ---- tune ----------------------------------------------------------------------------------------
