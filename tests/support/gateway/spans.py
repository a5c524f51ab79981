"""Spans of a test's own process, as the gateway would export them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once

from tests.support.tracing import setup_tracing
from triptych_common.telemetry.plain_spans import TailSampling


@contextmanager
def exported_spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Spans of a provider as the gateway has it, with this process's variables."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    provider: TracerProvider = setup_tracing(
        "gateway", "gateway-0", otlp_endpoint=None, traces_dir=None, tail_sampling=TailSampling()
    )
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    try:
        yield exporter
    finally:
        provider.shutdown()
