from dataclasses import replace

import pytest

from triptych_common.telemetry.span_records import AttributeValue, SpanRecord
from triptych_common.telemetry.waterfall import first_token_stages, render_waterfall

MS = 1_000_000


def record(
    name: str, span_id: str, parent: str | None, start_ms: float, end_ms: float, **more: str
) -> SpanRecord:
    return SpanRecord(
        trace_id="t", span_id=span_id, parent_id=parent, name=name, start_ns=int(1e18 + start_ms * MS),
        end_ns=int(1e18 + end_ms * MS), status=more.get("status", "unset"), service="svc",
        instance=more.get("instance", "gateway-0"), attributes={},
    )  # fmt: skip


SPANS = [
    record("encoder.encode", "c", "b", 20, 60, instance="encoder-0"),
    record("gateway.request", "a", None, 0, 100),
    record("queue.encode_job", "b", "a", 10, 70),
    record("prefill.wait", "d", "a", 50, 75, instance="an-instance-with-a-very-long-name", status="error"),
]


def test_rendering() -> None:
    bars = {
        "gateway.request": "█" * 25,
        "  queue.encode_job": "··" + "█" * 16 + "·" * 7,
        "    encoder.encode": "·" * 5 + "█" * 10 + "·" * 10,
        "  ! prefill.wait": "·" * 12 + "█" * 7 + "·" * 6,
    }
    lines = render_waterfall(SPANS, width=100).splitlines()
    assert [line[:34].rstrip() for line in lines] == ["span", *bars]
    assert [line[54:79] for line in lines[1:]] == list(bars.values())
    assert lines[3].endswith("    20.0      40.0")
    assert "an-instance-with-…" in lines[4]
    assert {len(line) for line in lines} == {99}


def test_spans_without_parent_or_length_are_seen() -> None:
    lines = render_waterfall([record("orphan", "x", "gone", 5, 5)]).splitlines()
    assert lines[1].startswith("orphan")
    assert "█" in lines[1]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_width_is_kept(width: int) -> None:
    widest = max(len(line) for line in render_waterfall(SPANS, width=width).splitlines())
    assert widest <= max(width, 75)


def test_the_time_to_first_token_is_said_by_stage() -> None:
    attributes: dict[str, AttributeValue] = {
        "triptych.request_id": "r", "triptych.ttft.body_ms": 1.04, "gen_ai.request.seed": 3,
        "triptych.ttft.prefill_ms": 9.5,
    }  # fmt: skip
    root = replace(SPANS[1], kind="server", attributes=attributes)
    assert first_token_stages([SPANS[0], root]) == "until the first token, ms: body 1.0, prefill 9.5"
    assert first_token_stages([replace(root, attributes={"triptych.request_id": "r"})]) == ""
    assert first_token_stages(SPANS) == first_token_stages([]) == ""
