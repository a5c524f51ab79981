"""One trace per request, and its context in everything that leaves the gateway."""

import logging
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import orjson
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.gateway.fake_prefill_decode import USAGE
from tests.support.gateway.local_encode import QUICK, tower
from tests.support.gateway.samples import MODEL, image_part
from tests.support.gateway.spans import exported_spans
from tests.support.gateway.system import System, opened_system
from triptych_common.telemetry import setup_logging

THEIRS = "00-" + "1" * 32 + "-" + "2" * 16
ROOT = f"chat {MODEL}"
TEXT = {"model": MODEL, "messages": [{"role": "user", "content": "a prompt that nobody may read"}]}
IMAGE = image_part(5)
TRUSTING = pytest.mark.parametrize("system", [{"trust_traceparent": True}], indirect=True)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    with exported_spans(monkeypatch) as exporter:
        yield exporter


@pytest.fixture
def unsampled_spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Where no trace is sampled unless its caller says so."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with exported_spans(monkeypatch) as exporter:
        yield exporter


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


def attributes_of(spans: InMemorySpanExporter, name: str = ROOT) -> dict[str, Any]:
    return dict(by_name(spans)[name].attributes or {})


def ids_of(span: ReadableSpan) -> tuple[str, str]:
    assert span.context is not None
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


async def test_every_stage_has_its_span(spans: InMemorySpanExporter, system: System) -> None:
    answer = await system.post(
        {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": [IMAGE]}]},
        headers={"traceparent": f"{THEIRS}-01"},
    )
    await system.assert_idle()
    found = by_name(spans)
    assert set(found) == {
        ROOT,
        "gateway.media",
        "gateway.encode_wait",
        "gateway.publish_job",
        "gateway.first_token",
        "gateway.stream",
    }
    root = found.pop(ROOT)
    assert root.parent is None, "a caller that is not trusted"
    assert root.kind is trace.SpanKind.SERVER
    assert root.attributes is not None
    assert root.attributes["triptych.request_id"] == answer.headers["x-request-id"]
    assert root.attributes["triptych.num_items"] == 1
    trace_id, root_id = ids_of(root)
    assert {f"{span.parent.span_id:016x}" for span in found.values() if span.parent} == {root_id}
    assert trace_id != "1" * 32

    assert f"{trace_id}-{root_id}" in str(system.encoder.traceparents[0])
    assert f"{trace_id}-{root_id}" in system.prefill_decode.bodies[0]["ec_transfer_params"]["traceparent"]
    header = system.prefill_decode.headers[0]["traceparent"]
    assert ids_of(found["gateway.first_token"])[1] in header
    assert trace_id in header


async def test_a_stream_in_the_terms_of_the_conventions(spans: InMemorySpanExporter, system: System) -> None:
    body = {
        "model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9,
        "temperature": 0.5, "stop": ["secret"], "messages": [{"role": "user", "content": [IMAGE]}],
    }  # fmt: skip
    await system.post(body)
    await system.assert_idle()
    found = attributes_of(spans)
    ttft_s = found.pop("gen_ai.server.time_to_first_token")
    assert found.pop("gen_ai.response.time_to_first_chunk") == ttft_s
    stages = {name: found.pop(name) for name in list(found) if name.startswith("triptych.ttft.")}
    assert {"body", "queue", "media", "sizes", "prefill"} <= {
        name.removeprefix("triptych.ttft.").removesuffix("_ms") for name in stages
    }
    assert all(ms >= 0 for ms in stages.values())
    assert sum(stages.values()) == pytest.approx(ttft_s * 1e3, abs=0.01)
    media = by_name(spans)["gateway.media"]
    assert stages["triptych.ttft.media_ms"] >= ((media.end_time or 0) - (media.start_time or 0)) / 1e6 - 0.1
    del found["triptych.request_id"], found["triptych.instance"]
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": "chatcmpl-x",
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": USAGE["prompt_tokens"],
        "gen_ai.usage.output_tokens": USAGE["completion_tokens"],
        "client.address": "127.0.0.1",
        "url.scheme": "http",
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "triptych.num_items": 1,
        "triptych.num_stop_sequences": 1,
        "triptych.decision": "remote",
        "triptych.decision_reason": found["triptych.decision_reason"],
        "triptych.decision.num_new_items": 1,
        "triptych.decision.num_unknown_items": 1,
        "triptych.decision.has_encoder": True,
        "triptych.decision.has_tower": False,
        "triptych.decision.shares_compute": False,
        "triptych.way": "whole",
        "triptych.way_reason": "no_pair",
        "triptych.routing": "pd-0 0",
        "triptych.routing_reason": "only",
        "triptych.version": "",
        "triptych.version_reason": "only_one",
    }


async def test_a_whole_answer_has_usage_and_no_first_token(
    spans: InMemorySpanExporter, system: System
) -> None:
    answer = await system.post(TEXT)
    found = attributes_of(spans)
    assert found["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert found["gen_ai.request.stream"] is False
    assert "gen_ai.server.time_to_first_token" not in found
    assert {"triptych.ttft.body_ms", "triptych.ttft.queue_ms"} <= set(found)
    assert "triptych.ttft.prefill_ms" not in found
    assert "nobody may read" not in str(found)


@pytest.mark.parametrize("system", [QUICK], indirect=True)
async def test_a_way_that_came_to_nothing_has_its_own_stage(
    spans: InMemorySpanExporter, system: System
) -> None:
    """Encoders hang, so an instance with a vision tower gets the request after a while."""
    await tower(system)
    system.encoder.before_metadata.clear()
    content = [{"type": "text", "text": "what is this?"}, IMAGE]
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": content}]}
    await system.post(body)
    await system.assert_idle()
    found = attributes_of(spans)
    stages = {name: ms for name, ms in found.items() if name.startswith("triptych.ttft.")}
    assert stages["triptych.ttft.given_up_ms"] >= 150, "most of local_encode_after_s"
    assert "triptych.ttft.sizes_ms" not in stages
    assert "triptych.ttft.prefill_ms" in stages
    assert sum(stages.values()) == pytest.approx(found["gen_ai.server.time_to_first_token"] * 1e3, abs=0.01)
    assert found["triptych.local_encode"] == "deadline_exceeded"


async def test_what_passes_is_the_same_with_and_without_spans(
    unsampled_spans: InMemorySpanExporter, system: System
) -> None:
    body = {**TEXT, "stream": True, "stream_options": {"include_usage": True}}
    recorded = await system.post(body, headers={"traceparent": f"{THEIRS}-01"})
    plain = await system.post(body)
    assert recorded.content == plain.content
    assert recorded.content.endswith(b"data: [DONE]\n\n")


async def test_failed_request_is_marked(spans: InMemorySpanExporter, system: System) -> None:
    system.prefill_decode.behaviour = "fail"
    await system.post(TEXT)
    root = by_name(spans)[ROOT]
    assert root.attributes is not None
    assert root.attributes["http.response.status_code"] == 503
    assert root.attributes["error.type"] == "generation_failed"
    assert not root.status.is_ok


async def test_refused_request_names_its_error_and_no_model(
    spans: InMemorySpanExporter, system: System
) -> None:
    answer = await system.post({**TEXT, "model": "made-up"})
    found = attributes_of(spans, "chat")
    assert answer.status_code == 404
    assert (found["error.type"], found["http.response.status_code"]) == ("model_not_found", 404)
    assert "made-up" not in str(found)
    assert by_name(spans)["chat"].status.is_unset, "a caller's error is none of the server's"


async def test_the_root_names_the_key(
    spans: InMemorySpanExporter, redis_url: str, tmp_path: Path, keys_file: Path
) -> None:
    async with opened_system(redis_url, tmp_path, api_keys_file=keys_file) as system:
        await system.post(TEXT, headers={"Authorization": "Bearer key-alice"})
    found = attributes_of(spans)
    assert found["triptych.api_key_name"] == "alice"
    assert found["triptych.tenant"] == "red"
    assert "key-alice" not in str(found)


@TRUSTING
async def test_a_trusted_callers_trace_goes_on(spans: InMemorySpanExporter, system: System) -> None:
    headers = {"traceparent": f"{THEIRS}-01", "tracestate": "vendor=x"}
    await system.post({**TEXT, "messages": [{"role": "user", "content": [IMAGE]}]}, headers=headers)
    await system.assert_idle()
    found = by_name(spans)
    root = found[ROOT]
    assert ids_of(root)[0] == "1" * 32
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == "2" * 16
    assert root.parent.is_remote
    assert {ids_of(span)[0] for span in found.values()} == {"1" * 32}
    assert "1" * 32 in str(system.encoder.traceparents[0])
    sent = system.prefill_decode.headers[0]
    assert sent["traceparent"].startswith(f"00-{'1' * 32}-")
    assert sent["tracestate"] == "vendor=x"


async def test_log_lines_of_a_request_have_the_id_of_its_trace(
    spans: InMemorySpanExporter, system: System
) -> None:
    out = StringIO()
    handlers, level = list(logging.getLogger().handlers), logging.getLogger().level
    try:
        setup_logging("gateway", "gateway-0", json_lines=True, stream=out)
        system.prefill_decode.behaviour = "fail"
        await system.post(TEXT)
    finally:
        logging.getLogger().handlers[:] = handlers
        logging.getLogger().setLevel(level)
    lines = [orjson.loads(line) for line in out.getvalue().splitlines()]
    module = "triptych_gateway.proxy"
    ours = {line["text"]: line["trace_id"] for line in lines if line["logger"].startswith(module)}
    trace_id = ids_of(by_name(spans)[ROOT])[0]
    assert ours == {"prefill_decode failed before its first token": trace_id, "request refused": trace_id}
