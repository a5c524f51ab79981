import random
import stat
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.util._once import Once

from tests.support.tracing import setup_tracing
from triptych_common import telemetry
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
    provider = setup_tracing("gateway", "gateway-0", otlp_endpoint=None, traces_dir=tmp_path)
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
    provider = setup_tracing("pd", "pd-0", otlp_endpoint=None, traces_dir=None)
    with telemetry.span("a"):
        assert telemetry.current_traceparent() is not None
    provider.shutdown()


def test_a_provider_that_others_set_is_left_alone_and_used(tmp_path: Path) -> None:
    engine_provider = TracerProvider()
    trace.set_tracer_provider(engine_provider)
    ours = setup_tracing("pd", "pd-0", otlp_endpoint=None, traces_dir=tmp_path)
    assert trace.get_tracer_provider() is engine_provider
    with telemetry.span("prefill.inject"):
        pass
    ours.shutdown()
    assert list(tmp_path.iterdir()) == []


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


CALLER = "00-" + "1" * 32 + "-" + "2" * 16


def test_a_callers_context_is_continued_with_its_state(provider: TracerProvider) -> None:
    headers = {"traceparent": [f"{CALLER}-01"], "tracestate": ["a=1", "b=2"]}
    with telemetry.span("chat", context=telemetry.context_of_headers(headers)) as begun:
        context = begun.get_span_context()
        assert f"{context.trace_id:032x}" == "1" * 32
        sent = telemetry.trace_headers()
    assert sent["traceparent"] == f"00-{'1' * 32}-{context.span_id:016x}-01"
    assert sent["tracestate"] == "a=1,b=2"
    assert telemetry.trace_headers() == {}


@pytest.mark.parametrize(
    "traceparents",
    [
        [],
        [""],
        [f"{CALLER}-01-more"],
        [f"ff{CALLER[2:]}-01"],
        [f"{CALLER[:-1]}-01"],
        [f"00-{'0' * 32}-{'2' * 16}-01"],
        [f"00-{'1' * 32}-{'0' * 16}-01"],
        [f"{CALLER}-01".replace("1", "A")],
        [f"{CALLER}-01\n x"],
        [f"{CALLER}-01", f"{CALLER}-01"],
    ],
)
def test_what_is_no_context_begins_a_trace_of_its_own(
    provider: TracerProvider, traceparents: list[str]
) -> None:
    context = telemetry.context_of_headers({"traceparent": traceparents})
    with telemetry.span("chat", context=context) as begun:
        assert begun.is_recording()
        assert f"{begun.get_span_context().trace_id:032x}" != "1" * 32


def test_requests_of_one_callers_trace_are_read_apart(provider: TracerProvider, tmp_path: Path) -> None:
    context = telemetry.context_of_headers({"traceparent": [f"{CALLER}-01"]})
    for number in range(2):
        own: dict[str, Any] = {"triptych.request_id": f"req-{number}"}
        with telemetry.span("chat m", context=context, kind=trace.SpanKind.SERVER, attributes=own):
            with telemetry.span("gateway.media"):
                pass
            carried = telemetry.current_traceparent()
        telemetry.record_span("prefill.wait", 1, 2, traceparent=carried, attributes=own)
    provider.force_flush()
    for number in range(2):
        spans = read_trace(tmp_path, f"req-{number}")
        assert sorted(span.name for span in spans) == ["chat m", "gateway.media", "prefill.wait"]
        (root,) = [span for span in spans if span.is_root]
        assert (root.parent_id, root.trace_id) == ("2" * 16, "1" * 32)
        assert root.attributes["triptych.request_id"] == f"req-{number}"
        assert {span.parent_id for span in spans} == {"2" * 16, root.span_id}


def test_the_sampler_of_opentelemetrys_variables_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    provider = setup_tracing("gateway", "g", otlp_endpoint=None, traces_dir=tmp_path)
    half, num_sampled = 1 << 63, 0
    for number in range(40):
        with telemetry.span("chat", attributes={"triptych.request_id": f"req-{number:02}"}) as root:
            context = root.get_span_context()
            is_sampled = context.trace_id & ((1 << 64) - 1) < half
            assert context.trace_flags.sampled == is_sampled
            assert root.is_recording() == is_sampled
            with telemetry.span("gateway.media") as child:
                assert child.is_recording() == is_sampled
                assert child.get_span_context().trace_id == context.trace_id
        num_sampled += is_sampled
        for flag in (0, 1):  # a caller's decision is followed, whatever the ratio
            with telemetry.span("x", traceparent=f"{CALLER}-0{flag}") as of_caller:
                assert of_caller.is_recording() == bool(flag)
    provider.shutdown()
    found = [number for number in range(40) if read_trace(tmp_path, f"req-{number:02}")]
    assert len(found) == num_sampled
    assert 0 < num_sampled < 40


def test_the_resource_says_of_which_product_and_version_a_process_is(
    provider: TracerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gateway` alone is the name of other products' services, too."""
    attributes = provider.resource.attributes
    assert attributes["service.namespace"] == "triptych"
    assert attributes["service.name"] == "gateway"
    assert attributes["service.version"] == version("triptych-common")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=mine")
    named = setup_tracing("gateway", "gateway-0", otlp_endpoint=None, traces_dir=None)
    assert named.resource.attributes["service.namespace"] == "mine", "the operator's own wins"
