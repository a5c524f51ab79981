"""Spans reach a receiver of OTLP over HTTP and over gRPC, as the specification has it."""

from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.util._once import Once

from tests.support.otlp_receivers import RECEIVERS, http_receiver, spans_of
from tests.support.tracing import setup_tracing
from triptych_common import telemetry
from triptych_common.runtime import ServiceSettings
from triptych_common.telemetry import exporters
from triptych_common.telemetry.exporters import OtlpProtocol
from triptych_common.telemetry.plain_spans import TailSampling

THEIRS = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


@pytest.fixture(autouse=True)
def _fresh_global_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_a_receiver_gets_the_spans_of_a_request(protocol: OtlpProtocol) -> None:
    with RECEIVERS[protocol]() as (endpoint, received):
        provider = setup_tracing(
            "gateway", "gateway-0", otlp_endpoint=endpoint, otlp_protocol=protocol, traces_dir=None
        )
        context = telemetry.context_of_headers({"traceparent": [THEIRS]})
        attributes = {"triptych.request_id": "req-1", "gen_ai.response.finish_reasons": ["stop"]}
        with (
            telemetry.span("chat m", context=context, kind=trace.SpanKind.SERVER, attributes=attributes),
            telemetry.span("gateway.media"),
        ):
            pass
        provider.shutdown()
    spans = spans_of(received)
    root, media = spans["chat m"], spans["gateway.media"]
    assert root.trace_id == media.trace_id == bytes.fromhex("1" * 32)
    assert root.parent_span_id == bytes.fromhex("2" * 16)
    assert media.parent_span_id == root.span_id
    assert (root.kind, media.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_INTERNAL)
    found = {each.key: each.value for each in root.attributes}
    assert found["triptych.request_id"].string_value == "req-1"
    assert [each.string_value for each in found["gen_ai.response.finish_reasons"].array_value.values] == [
        "stop"
    ]
    resource = {
        each.key: each.value.string_value for each in received[0].resource_spans[0].resource.attributes
    }
    assert (resource["service.name"], resource["service.instance.id"]) == ("gateway", "gateway-0")


def test_what_is_kept_late_reaches_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with http_receiver() as (endpoint, received):
        provider = setup_tracing(
            "gateway", "g", otlp_endpoint=endpoint, traces_dir=None, tail_sampling=TailSampling()
        )
        for fails in (False, True):
            with telemetry.span(f"fails: {fails}") as root, telemetry.span(f"child of {fails}"):
                if fails:
                    root.set_status(trace.StatusCode.ERROR)
        provider.shutdown()
    assert set(spans_of(received)) == {"fails: True", "child of True"}


def test_without_the_package_grpc_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TRIPTYCH_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert ServiceSettings.load([]).otlp_protocol == "grpc"
    monkeypatch.setattr(exporters, "find_spec", lambda name: None)
    assert ServiceSettings.load([]).otlp_protocol == "grpc"  # there is no collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317")
    with pytest.raises(SystemExit):
        ServiceSettings.load([])
    assert "opentelemetry-exporter-otlp-proto-grpc" in capsys.readouterr().err
    assert ServiceSettings.load(["--otlp-protocol", "http/protobuf"]).otlp_protocol == "http/protobuf"
