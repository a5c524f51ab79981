"""One OpenTelemetry trace per request, through every process.

Context travels in messages as a W3C `traceparent`. `span` and `record_span` use whatever provider
is set globally, so they also work inside engines that set up tracing of their own.
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from triptych_common.telemetry.span_records import FileSpanExporter
from triptych_common.telemetry.trace_files import DEFAULT_MAX_BYTES

Attributes = Mapping[str, str | bool | int | float]

INSTANCE = "triptych.instance"
REQUEST_ID = "triptych.request_id"
EXPORT_DELAY_MS = 200

_SCOPE = "triptych"
_propagator = TraceContextTextMapPropagator()


class _SystemIdGenerator(IdGenerator):
    """Ids from the operating system.

    vLLM seeds Python's generator alike in each of its workers: spans of one trace would share their ids.
    """

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1  # 0 is none

    def generate_trace_id(self) -> int:
        return secrets.randbits(128) or 1


class _InstanceOnEverySpan(SpanProcessor):
    """Puts `triptych.instance` on each span: one file or backend holds spans of many instances."""

    def __init__(self, instance: str) -> None:
        self._instance = instance

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        span.set_attribute(INSTANCE, self._instance)


def setup_tracing(
    service_name: str,
    instance: str,
    *,
    otlp_endpoint: str | None,
    traces_dir: Path | None,
    traces_max_bytes: int = DEFAULT_MAX_BYTES,
) -> TracerProvider:
    """Build this process's tracer provider, and set it globally if none is set yet.

    Spans go to `otlp_endpoint` (base URL, as in OTEL_EXPORTER_OTLP_ENDPOINT) if given, else to a file
    in `traces_dir` if given, where this process keeps `traces_max_bytes` at most (0: nothing), else nowhere.
    Call the provider's `shutdown()` at the end: it flushes.
    """
    provider = TracerProvider(
        resource=Resource.create({"service.name": service_name, "service.instance.id": instance}),
        id_generator=_SystemIdGenerator(),
    )
    provider.add_span_processor(_InstanceOnEverySpan(instance))
    exporter = _exporter(service_name, instance, otlp_endpoint, traces_dir, traces_max_bytes)
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_DELAY_MS))
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        trace.set_tracer_provider(provider)
    return provider


def _exporter(
    service_name: str,
    instance: str,
    otlp_endpoint: str | None,
    traces_dir: Path | None,
    traces_max_bytes: int = DEFAULT_MAX_BYTES,
) -> SpanExporter | None:
    if otlp_endpoint is not None:
        # Imported here: it pulls in requests and protobuf, which most processes never need.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )

        return OTLPSpanExporter(endpoint=f"{otlp_endpoint.rstrip('/')}/v1/traces")
    if traces_dir is not None and traces_max_bytes:
        return FileSpanExporter(traces_dir, service_name, instance, traces_max_bytes)
    return None


def tracer() -> trace.Tracer:
    """The tracer of the provider that is set globally at the time of the call."""
    return trace.get_tracer(_SCOPE)


def current_traceparent() -> str | None:
    """`traceparent` of the span that is active here; None outside of any."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get("traceparent")


def traceparent_of(span: trace.Span) -> str | None:
    """`traceparent` that makes others children of `span`; None if it is not recording anywhere."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent")


def context_from(traceparent: str | None) -> Context:
    """Context whose spans continue `traceparent`; an empty one if it is None or not valid."""
    if traceparent is None:
        return Context()
    return _propagator.extract({"traceparent": traceparent}, context=Context())


@contextmanager
def span(
    name: str, *, traceparent: str | None = None, attributes: Attributes | None = None
) -> Iterator[trace.Span]:
    """A span around the body, active in it; an exception marks it failed.

    Its parent is `traceparent` if given, else the active span.
    """
    context = None if traceparent is None else context_from(traceparent)
    with tracer().start_as_current_span(name, context=context, attributes=dict(attributes or {})) as started:
        yield started


def record_span(
    name: str,
    start_ns: int,
    end_ns: int,
    *,
    traceparent: str | None,
    attributes: Attributes | None = None,
    error: str | None = None,
) -> str | None:
    """A span that was measured already, as child of `traceparent` (None: of the active span).

    Args:
        start_ns, end_ns: wall clock, nanoseconds since the epoch (`time.time_ns()`).
        error: marks the span failed, with this description.

    Returns:
        The `traceparent` of the recorded span, so that others can hang below it.
    """
    context = None if traceparent is None else context_from(traceparent)
    recorded = tracer().start_span(
        name, context=context, start_time=start_ns, attributes=dict(attributes or {})
    )
    if error is not None:
        recorded.set_status(trace.Status(trace.StatusCode.ERROR, error))
    recorded.end(end_time=max(start_ns, end_ns))
    return traceparent_of(recorded)
