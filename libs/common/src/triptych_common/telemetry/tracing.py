"""One OpenTelemetry trace per request, through every process.

Context travels in messages as a W3C `traceparent`. `span` and `record_span` use whatever provider
is set globally, so they also work inside engines that set up tracing of their own.
"""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from triptych_common import release
from triptych_common.telemetry.exporters import TracingSettings, span_exporter
from triptych_common.telemetry.plain_spans import PlainTracer, TailSampling, active_span
from triptych_common.telemetry.span_records import INSTANCE

ID_BYTES = 16
_NUM_AT_ONCE = 256
_unused: deque[bytes] = deque()
os.register_at_fork(after_in_child=_unused.clear)  # parent and child would hand out the same ones

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]

EXPORT_DELAY_MS = 200

_SCOPE = "triptych"
_propagator = TraceContextTextMapPropagator()


def random_id() -> bytes:
    """Return 16 random bytes, unique over processes. Callable from any thread.

    They come from the operating system, many at a time: a call takes 5 µs, and a request needs several. vLLM
    seeds Python's own generator alike in each of its workers: their ids would be the same.
    """
    while True:
        try:
            return _unused.pop()
        except IndexError:
            drawn = os.urandom(ID_BYTES * _NUM_AT_ONCE)
            _unused.extend(drawn[at : at + ID_BYTES] for at in range(0, len(drawn), ID_BYTES))


class _SystemIdGenerator(IdGenerator):
    """Generator of ids from the operating system (`random_id`)."""

    def generate_span_id(self) -> int:
        return int.from_bytes(random_id()[:8]) or 1  # 0 is none

    def generate_trace_id(self) -> int:
        return int.from_bytes(random_id()) or 1


class _Provider(TracerProvider):
    """OpenTelemetry's provider, with plain spans for Triptych and its own for others, such as vLLM.

    Both ask the same sampler, which is the one that OpenTelemetry's variables name (OTEL_TRACES_SAMPLER).
    Each span of ours has `triptych.instance`: one file or backend holds spans of many instances.
    """

    def __init__(self, service_name: str, instance: str, tail_sampling: TailSampling | None) -> None:
        ids = _SystemIdGenerator()
        # What OTEL_RESOURCE_ATTRIBUTES says wins over these, not over the names.
        ours = Resource({"service.namespace": "triptych", "service.version": release()})
        resource = ours.merge(
            Resource.create({"service.name": service_name, "service.instance.id": instance})
        )
        super().__init__(resource=resource, id_generator=ids)
        self._plain = PlainTracer(
            _SCOPE,
            resource,
            ids,
            {INSTANCE: instance},
            self._on_end,
            sampler=None if self.sampler is DEFAULT_ON else self.sampler,
            tail_sampling=tail_sampling,
        )
        self._processors: tuple[SpanProcessor, ...] = ()

    def get_tracer(self, instrumenting_module_name: str, *args: Any, **options: Any) -> trace.Tracer:
        """Return a plain tracer for Triptych, unless OpenTelemetry is off (OTEL_SDK_DISABLED)."""
        tracer = super().get_tracer(instrumenting_module_name, *args, **options)
        is_on = not isinstance(tracer, trace.NoOpTracer)
        return self._plain if is_on and instrumenting_module_name == _SCOPE else tracer

    def add_span_processor(self, span_processor: SpanProcessor) -> None:
        super().add_span_processor(span_processor)
        self._processors += (span_processor,)

    def _on_end(self, span: ReadableSpan) -> None:
        for processor in self._processors:
            processor.on_end(span)


class _InstanceOnEverySpan(SpanProcessor):
    def __init__(self, instance: str) -> None:
        self._instance = instance

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        span.set_attribute(INSTANCE, self._instance)


def setup_service_tracing(
    service_name: str, settings: TracingSettings, tail_sampling: TailSampling | None = None
) -> TracerProvider:
    """Build this process's tracer provider, and set it globally if none is set yet.

    Call the provider's `shutdown()` at the end: it flushes. `tail_sampling`: rules by which this process
    keeps its own spans of unsampled requests.
    """
    exporter = span_exporter(service_name, settings)
    provider = _Provider(service_name, settings.instance, tail_sampling)
    provider.add_span_processor(_InstanceOnEverySpan(settings.instance))
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_DELAY_MS))
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        trace.set_tracer_provider(provider)
    return provider


def tracer() -> trace.Tracer:
    return _tracer_of(trace.get_tracer_provider())


@lru_cache(maxsize=4)
def _tracer_of(provider: trace.TracerProvider) -> trace.Tracer:
    """Cache the tracer: a provider reads its whole configuration at each call."""
    return provider.get_tracer(_SCOPE)


def current_traceparent() -> str | None:
    """Return the `traceparent` of the active span, or None."""
    return traceparent_of(trace.get_current_span())


def traceparent_of(span: trace.Span) -> str | None:
    """Return the `traceparent` that makes spans children of `span`; None if it is not recording."""
    context = span.get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def context_from(traceparent: str | None) -> Context:
    """Return a context whose spans continue `traceparent`; an empty one if it is None or invalid."""
    if not traceparent:
        return Context()
    return _propagator.extract({"traceparent": traceparent}, context=Context())


def context_of_headers(headers: Mapping[str, Sequence[str]]) -> Context:
    """Return the context of `traceparent` and `tracestate`, by lower-case names; empty if they are invalid.

    Several `traceparent`s count as none, since they are ambiguous.
    """
    if len(headers.get("traceparent", ())) != 1:
        return Context()
    carrier = {name: list(values) for name, values in headers.items()}
    return _propagator.extract(carrier, context=Context())


def trace_headers() -> dict[str, str]:
    """Return headers that make the receiver's spans children of the active one, if any."""
    headers: dict[str, str] = {}
    _propagator.inject(headers)
    return headers


def within_trace(traceparent: str | None) -> AbstractContextManager[object]:
    """Give log lines of the block the trace id of `traceparent`, also between its spans."""
    if not traceparent:
        return nullcontext()
    return trace.use_span(trace.get_current_span(context_from(traceparent)))


def span(
    name: str,
    *,
    traceparent: str | None = None,
    context: Context | None = None,
    kind: trace.SpanKind = trace.SpanKind.INTERNAL,
    attributes: Attributes | None = None,
) -> AbstractContextManager[trace.Span]:
    """Open a span around the body, active in it; an exception marks it failed.

    Its parent is `traceparent` if given, else that of `context` if given (an empty one: none), else the
    active span.
    """
    if traceparent is not None:
        context = context_from(traceparent)
    return active_span(tracer().start_span(name, context=context, kind=kind, attributes=attributes))


def record_span(
    name: str,
    start_ns: int,
    end_ns: int,
    *,
    traceparent: str | None,
    attributes: Attributes | None = None,
    error: str | None = None,
) -> str | None:
    """Record a span that was measured already, as child of `traceparent` (None: of the active span).

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
