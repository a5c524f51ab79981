import random
import stat
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.util._once import Once

from triptych_common import telemetry
from triptych_common.telemetry import tracing
from triptych_common.telemetry.span_records import SpanRecord
from triptych_common.telemetry.trace_reader import read_trace

SECOND_NS = 1_000_000_000


@pytest.fixture(autouse=True)
def _fresh_global_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry allows one global provider per process; each test here needs its own."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[TracerProvider]:
    provider = telemetry.setup_tracing("gateway", "gateway-0", otlp_endpoint=None, traces_dir=tmp_path)
    yield provider
    provider.shutdown()


def by_name(spans: list[SpanRecord]) -> dict[str, SpanRecord]:
    return {span.name: span for span in spans}


def test_trace_goes_through_messages_and_comes_back_from_files(
    provider: TracerProvider, tmp_path: Path
) -> None:
    with telemetry.span("gateway.request", attributes={"triptych.request_id": "req-1", "n": 2}):
        carried = telemetry.current_traceparent()
        with telemetry.span("gateway.media"):
            pass
    with telemetry.span("encoder.encode", traceparent=carried):
        pass
    inject = telemetry.record_span(
        "prefill.inject", 5 * SECOND_NS, 6 * SECOND_NS, traceparent=carried, error="gone"
    )
    telemetry.record_span("prefill.wait", 4 * SECOND_NS, 3 * SECOND_NS, traceparent=inject)
    with telemetry.span("gateway.request", attributes={"triptych.request_id": "req-2"}):
        pass
    provider.force_flush()

    spans = by_name(read_trace(tmp_path, "req-1"))
    assert set(spans) == {
        "gateway.request",
        "gateway.media",
        "encoder.encode",
        "prefill.inject",
        "prefill.wait",
    }
    root = spans["gateway.request"]
    assert (root.parent_id, root.attributes["n"], root.status) == (None, 2, "unset")
    assert all(span.attributes["triptych.instance"] == "gateway-0" for span in spans.values())
    for name in ("gateway.media", "encoder.encode", "prefill.inject"):
        assert spans[name].parent_id == root.span_id
    assert spans["prefill.wait"].parent_id == spans["prefill.inject"].span_id
    assert (spans["prefill.inject"].duration_ms, spans["prefill.inject"].status) == (1000.0, "error")
    assert spans["prefill.wait"].duration_ms == 0, "a clock that went back gives no negative span"


def test_exception_marks_the_span(provider: TracerProvider, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="bad"),
        telemetry.span("gateway.request", attributes={"triptych.request_id": "r"}),
    ):
        raise ValueError("bad")
    provider.force_flush()
    assert read_trace(tmp_path, "r")[0].status == "error"


def test_files_are_private_and_a_cut_line_is_passed_over(provider: TracerProvider, tmp_path: Path) -> None:
    with telemetry.span("gateway.request", attributes={"triptych.request_id": "r"}):
        pass
    provider.force_flush()
    (path,) = tmp_path.glob("gateway-*.jsonl")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    whole = path.read_bytes()
    span = orjson.loads(whole)
    path.write_bytes(whole + b'{"r": foreign}\n{"r": 1}\n' + whole[: len(whole) // 2])
    assert [each.span_id for each in read_trace(tmp_path, "r")] == [span["span_id"]]


def test_no_such_trace(tmp_path: Path) -> None:
    assert read_trace(tmp_path, "r") == []
    assert read_trace(tmp_path / "missing", "r") == []


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-01"])
def test_bad_traceparent_starts_a_new_trace(provider: TracerProvider, traceparent: str) -> None:
    with telemetry.span("a", traceparent=traceparent) as span:
        assert span.get_span_context().is_valid


def test_nothing_set_up_costs_nothing_and_carries_nothing() -> None:
    assert telemetry.current_traceparent() is None
    with telemetry.span("a"):
        assert telemetry.current_traceparent() is None
    assert telemetry.record_span("a", 1, 2, traceparent=None) is None


def test_without_export_the_context_still_travels() -> None:
    provider = telemetry.setup_tracing("pd", "pd-0", otlp_endpoint=None, traces_dir=None)
    with telemetry.span("a"):
        assert telemetry.current_traceparent() is not None
    provider.shutdown()


def test_a_provider_that_others_set_is_left_alone_and_used(tmp_path: Path) -> None:
    engine_provider = TracerProvider()
    trace.set_tracer_provider(engine_provider)
    ours = telemetry.setup_tracing("pd", "pd-0", otlp_endpoint=None, traces_dir=tmp_path)
    assert trace.get_tracer_provider() is engine_provider
    with telemetry.span("prefill.inject"):
        pass
    ours.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_otlp_endpoint_gets_the_path_of_traces() -> None:
    exporter = tracing._exporter("a", "a-0", "http://collector:4318/", None)
    assert getattr(exporter, "_endpoint", None) == "http://collector:4318/v1/traces"
    assert exporter is not None
    exporter.shutdown()


def test_spans_of_workers_that_vllm_seeded_alike_have_ids_of_their_own(provider: TracerProvider) -> None:
    state = random.getstate()
    try:
        ids = []
        for _ in range(2):
            random.seed(0)
            with telemetry.span("encoder.encode") as started:
                ids.append(started.get_span_context().span_id)
    finally:
        random.setstate(state)
    assert ids[0] != ids[1]
