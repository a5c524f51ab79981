"""One trace per request, and its context in everything that leaves the gateway."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.gateway.media_samples import data_url, image_bytes
from tests.support.gateway.serving import MODEL
from tests.support.gateway.system import System, opened_system


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Spans of this test, from a provider that any test has set up."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())
    provider: Any = trace.get_tracer_provider()
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield exporter
    exporter.shutdown()


async def test_every_stage_has_its_span(spans: InMemorySpanExporter, system: System) -> None:
    content = [{"type": "image_url", "image_url": {"url": data_url(image_bytes(5))}}]
    theirs = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    answer = await system.post(
        {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": content}]},
        headers={"traceparent": theirs},
    )
    await system.assert_idle()
    by_name: dict[str, ReadableSpan] = {span.name: span for span in spans.get_finished_spans()}
    assert set(by_name) == {
        "gateway.request",
        "gateway.media",
        "gateway.encode_wait",
        "gateway.first_token",
        "gateway.stream",
    }
    root = by_name.pop("gateway.request")
    assert root.parent is None
    assert root.attributes is not None
    assert root.attributes["triptych.request_id"] == answer.headers["x-request-id"]
    assert root.attributes["triptych.num_items"] == 1
    assert {span.parent.span_id for span in by_name.values() if span.parent} == {root.context.span_id}

    root_id = f"{root.context.trace_id:032x}-{root.context.span_id:016x}"
    assert root_id in str(system.encoder.traceparents[0])
    assert root_id in system.prefill_decode.bodies[0]["ec_transfer_params"]["traceparent"]
    header = system.prefill_decode.headers[0]["traceparent"]
    assert f"{by_name['gateway.first_token'].context.span_id:016x}" in header
    assert f"{root.context.trace_id:032x}" in header


async def test_failed_request_is_marked(spans: InMemorySpanExporter, system: System) -> None:
    system.prefill_decode.behaviour = "fail"
    await system.post({"model": MODEL, "messages": [{"role": "user", "content": "x"}]})
    (root,) = [span for span in spans.get_finished_spans() if span.name == "gateway.request"]
    assert root.attributes is not None
    assert root.attributes["http.response.status_code"] == 503
    assert not root.status.is_ok


async def test_the_root_names_the_key(
    spans: InMemorySpanExporter, redis_url: str, tmp_path: Path, keys_file: Path
) -> None:
    async with opened_system(redis_url, tmp_path, api_keys_file=keys_file) as system:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        await system.post(body, headers={"Authorization": "Bearer key-alice"})
    (root,) = [span for span in spans.get_finished_spans() if span.name == "gateway.request"]
    assert root.attributes is not None
    assert root.attributes["triptych.api_key_name"] == "alice"
    assert root.attributes["triptych.tenant"] == "red"
    assert "key-alice" not in str(dict(root.attributes))
