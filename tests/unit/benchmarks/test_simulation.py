"""The model of a deployment against what can be computed by hand, and its reading of traces."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from simulation.calibration import ROOT, CalibrationError, fit_line, read_traces
from simulation.parameters import Deployment, StageTimes, stage_times
from simulation.studies import chat, monolith, triptych
from simulation.system import Scaling, simulate
from simulation.workload import Arrivals, RequestKind, Stream, Workload, closed

from triptych_cli.roles import Bounds
from triptych_cli.supervisor.autoscaler import ScalingRules

GPU = StageTimes.load(Path("h100-qwen2.5-vl-7b"))
ONE = Deployment("one host", ((1, 1),))
IMAGE = RequestKind("image", 1, image_side=280, num_text_words=10, num_output_tokens=1)  # 100 rows
FOUR = replace(IMAGE, name="four", num_images=4)
ZERO: dict[str, object] = {
    "name": "by hand", "origin": "assumed", "note": "", "row_bytes": 1000, "tokens_per_word": 1.0,
    "template_tokens": 0.0, "client_s": 0.0, "shares_core": False,
    "gateway": {"request_s": 0.0, "request_rest_s": 0.0, "item_s": 0.0, "item_rest_s": 0.0, "media_s": 0.0,
                "media_row_s": 0.0, "chunk_s": 0.0},
    "redis": {"command_s": 0.0, "byte_s": 0.0, "hop_s": 0.0, "item_commands": 1, "known_item_commands": 0,
              "beat_commands": 0},
    "encoder": {"preprocess_s": 0.0, "preprocess_row_s": 0.0, "num_threads": 8, "reserve_s": 0.0,
                "step_s": 0.0, "row_s": 1e-3, "step_rows": 1000, "write_bytes_per_s": 1e15, "seal_s": 0.0},
    "engine": {"front_s": 0.0, "front_token_s": 0.0, "reply_s": 0.0, "wake_s": 0.0, "step_s": 0.0,
               "token_s": 1e-3, "sequence_s": 0.0, "context_s": 0.0, "inject_bytes_per_s": 0.0,
               "max_step_tokens": 10_000, "max_sequences": 64, "kv_tokens": 100_000, "cache_rows": 1000},
    "store": {"command_s": 0.0, "item_commands": 1},
}  # fmt: skip


def times(**parts: dict[str, object]) -> StageTimes:
    """All zero but encode and prefill, a millisecond a row and a token; with changes."""
    raw = json.loads(json.dumps(ZERO))
    for name, changes in parts.items():
        raw[name] |= changes
    return stage_times(raw)


def one_request(kind: RequestKind, deployment: Deployment, costs: StageTimes) -> float:
    """Its TTFT in milliseconds, alone."""
    workload = Workload([Stream(kind, Arrivals.REGULAR, rate=1.0)], 1.5)
    return simulate(costs, deployment, workload).ttft_ms(0.5)


def test_one_image_takes_its_stages_one_after_the_other() -> None:
    costs = times(
        gateway={"request_s": 0.001, "item_s": 0.002, "media_s": 0.003},
        redis={"hop_s": 0.004, "command_s": 0.001, "item_commands": 5},
        encoder={"preprocess_s": 0.006, "seal_s": 0.007, "write_bytes_per_s": 1e7},
        engine={"front_s": 0.001, "wake_s": 0.008, "step_s": 0.009, "reply_s": 0.010},
    )
    gateway, to_encoder, encode = 1 + 2 + 3, 5 + 4 + 6, 100 + 10  # the copy of 100 kB: 10 ms
    prefill = 9 + 110 + 10
    assert one_request(IMAGE, ONE, costs) == pytest.approx(gateway + to_encoder + encode + 7 + 8 + prefill)


def test_a_monolith_encodes_in_its_step() -> None:
    costs = times(encoder={"preprocess_s": 0.006, "step_s": 0.010}, engine={"front_s": 0.001})
    assert one_request(IMAGE, monolith(1, 1), costs) == pytest.approx(1 + 6 + 10 + 100 + 110)


def test_without_overlap_all_images_come_before_the_first_token_is_computed() -> None:
    """Four encodes of 100 ms, then a prefill of 410."""
    assert one_request(FOUR, replace(ONE, batch_items=1), times()) == pytest.approx(400 + 410)


def test_overlap_hides_the_shorter_stage_but_for_the_last_image() -> None:
    """The prefill of an image runs beside the encode of the next: only one, and the text, come after."""
    deployment = replace(ONE, batch_items=1, overlap=True)
    assert one_request(FOUR, deployment, times()) == pytest.approx(400 + 100 + 10)
    slow_prefill = times(engine={"token_s": 2e-3})
    assert one_request(FOUR, deployment, slow_prefill) == pytest.approx(100 + 4 * 200 + 20)


def test_text_before_an_image_is_computed_while_it_is_encoded() -> None:
    kind = replace(IMAGE, num_text_words=50, text_before_share=1.0)
    assert one_request(kind, replace(ONE, overlap=True), times()) == pytest.approx(100 + 100)
    assert one_request(kind, ONE, times()) == pytest.approx(100 + 150)


def test_a_known_image_asks_no_encoder() -> None:
    results = simulate(times(), ONE, closed(replace(IMAGE, known_share=1.0), 1, 1.0))
    assert results.ttft_ms(0.5) == pytest.approx(110)
    assert results.shares.encoder == 0.0


def test_an_encoder_bounds_what_goes_through() -> None:
    """Ten encodes a second, and an engine that takes more."""
    costs = times(engine={"token_s": 1e-5})
    workload = Workload([Stream(IMAGE, Arrivals.POISSON, rate=50.0)], 20.0)  # leaves work for 80 s
    results = simulate(costs, ONE, workload, warm_s=5.0)
    assert results.requests_per_s == pytest.approx(10.0, rel=0.05)
    assert not results.keeps_up
    assert results.shares.encoder == pytest.approx(1.0, abs=0.02)
    assert results.shares.first()[0] in ("encoder", "hottest_encoder")


@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_is_answered_and_nothing_is_left(overlap: bool) -> None:
    kinds = [IMAGE, FOUR, RequestKind("text", num_text_words=30, num_output_tokens=20)]
    workload = Workload([Stream(kind, Arrivals.POISSON, rate=1.0) for kind in kinds], 30.0)
    deployment = Deployment("two", ((1, 2), (2, 1)), is_whole=True, link_bytes_per_s=1e9, overlap=overlap)
    results = simulate(times(engine={"kv_tokens": 900, "max_step_tokens": 64}), deployment, workload)
    assert results.num_unanswered == 0
    assert results.num_answered == results.num_arrived > 50


# ---- traces ----------------------------------------------------------------------------------------
def span(trace_id: str, name: str, start_ms: float, end_ms: float, **attributes: object) -> bytes:
    kind = "server" if name.startswith("chat") else "internal"
    record = {
        "trace_id": trace_id, "span_id": f"{trace_id}-{name}-{start_ms}", "parent_id": None, "name": name,
        "start_ns": int(start_ms * 1e6), "end_ns": int(end_ms * 1e6), "status": "ok", "service": "gateway",
        "instance": "gateway-0", "attributes": attributes, "kind": kind,
    }  # fmt: skip
    return json.dumps(record).encode() + b"\n"


@pytest.fixture
def traces_dir(tmp_path: Path) -> Path:
    latency = {
        f"gen_ai.latency.{n}": v for n, v in (("time_to_first_token", 0.05), ("time_in_model_prefill", 0.03))
    }
    (tmp_path / "gateway-1.jsonl").write_bytes(
        span("a", "chat digits-vl", 0, 100, **{"triptych.request_id": "req-a"})
        + span("b", "chat digits-vl", 0, 100, **{"triptych.request_id": "req-b"})
        + b'{"trace_id": "cut off'
    )
    (tmp_path / "prefill_decode-2.jsonl").write_bytes(span("a", "llm_request", 10, 90, **latency))
    return tmp_path


def test_traces_are_put_together_from_all_files(traces_dir: Path) -> None:
    found = read_traces(traces_dir, ["req-a", "req-b", "req-unknown"])
    assert list(found) == ["req-a"]  # of the other, vLLM's part is missing
    assert found["req-a"].seconds(ROOT) == pytest.approx(0.1)
    assert found["req-a"].scheduled_ns == pytest.approx(30e6)
    with pytest.raises(CalibrationError, match=r"encoder\.encode"):
        found["req-a"].one("encoder.encode")


def test_a_line_goes_through_the_medians() -> None:
    assert fit_line([(1, 3.0), (1, 3.0), (1, 99.0), (3, 7.0)]) == pytest.approx((1.0, 2.0))
    assert fit_line([(1, 5.0), (2, 3.0)]) == (4.0, 0.0)  # a cost does not shrink
    with pytest.raises(CalibrationError):
        fit_line([(1, 2.0), (1, 3.0)])


def burst(seconds: float) -> Workload:
    """One image a request: two a second, and sixty for three seconds."""
    kind = chat(1, tokens=2)
    return Workload(
        [
            Stream(kind, Arrivals.POISSON, rate=2.0),
            Stream(kind, Arrivals.POISSON, rate=58.0, begins_s=3.0, ends_s=6.0),
        ],
        seconds,
    )


def test_encoders_follow_a_burst_and_go_again() -> None:
    seconds = 20.0
    scaling = Scaling(ScalingRules(0.5, 3.0, 0.0), Bounds(1, 4), interval_s=0.5, start_s=0.5)
    few = simulate(GPU, triptych([(1, 6)]), burst(seconds))
    some = simulate(GPU, triptych([(4, 6)]), burst(seconds), scaling=scaling)
    assert some.ttft_ms(0.9) < few.ttft_ms(0.9)
    assert seconds < some.encoder_s < 0.7 * 4 * seconds
    assert (some.num_answered, some.num_unanswered) == (few.num_answered, 0)
