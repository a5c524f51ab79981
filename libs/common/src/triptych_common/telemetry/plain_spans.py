"""Spans that cost little: OpenTelemetry's own take four times as long, for limits, locks and samplers.

A `PlainSpan` belongs to one thread at a time, as every span of Triptych does, and holds its values. At its
end it becomes a span for OpenTelemetry's processors and exporters. A sampler of OpenTelemetry's decides
whether a trace is sampled, as a rule by the parent's flag. Spans of others can be held (`tail_sampling`);
else they are not recorded.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.util._decorator import _agnosticcontextmanager
from opentelemetry.util.types import Attributes, AttributeValue

MAX_HELD_SPANS = 256  # of one request; the first span is always among those that are kept
NS_PER_MS = 1_000_000

SpanT = TypeVar("SpanT")

OnEnd = Callable[[ReadableSpan], None]
KEPT_FOR = "triptych.kept_for"
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_NOT_SAMPLED = trace.TraceFlags(trace.TraceFlags.DEFAULT)


@dataclass(frozen=True, slots=True)
class TailSampling:
    """Rules for unsampled requests whose spans are kept all the same."""

    errors: bool = True  # keep requests whose first span failed
    slow_ms: float = 0.0  # keep requests whose first span took this long; 0: none for that

    @property
    def is_on(self) -> bool:
        return self.errors or self.slow_ms > 0

    def reason(self, *, is_error: bool, duration_ns: int) -> str | None:
        """Return why a request is kept, or None."""
        if self.errors and is_error:
            return "error"
        if self.slow_ms and duration_ns >= self.slow_ms * NS_PER_MS:
            return "slow"
        return None


@dataclass(slots=True)
class HeldSpans(Generic[SpanT]):
    """Ended spans of one request, until its first span ends. Those that end later are lost.

    Then all are exported, or none. Other processes receive `not sampled` from the beginning and record
    nothing of the request.
    """

    num_lost: int = 0
    _ended: list[SpanT] = field(default_factory=list)
    _is_open: bool = True

    def add(self, span: SpanT) -> None:
        if self._is_open and len(self._ended) < MAX_HELD_SPANS:
            self._ended.append(span)
        else:
            self.num_lost += 1

    def take(self) -> list[SpanT]:
        """Return all held spans; no more are held."""
        ended, self._ended, self._is_open = self._ended, [], False
        return ended


class PlainTracer(trace.Tracer):
    """Tracer of plain spans, each with `attributes`; `on_end` gets ended spans that are kept.

    Args:
        sampler: None: every trace that has no parent is sampled, and those whose parent is.
        tail_sampling: keeps spans of unsampled traces; None: none.
    """

    def __init__(
        self,
        scope: str,
        resource: Resource,
        ids: IdGenerator,
        attributes: Attributes,
        on_end: OnEnd,
        *,
        sampler: Sampler | None = None,
        tail_sampling: TailSampling | None = None,
    ) -> None:
        self.scope = InstrumentationScope(scope)
        self.resource = resource
        self.on_end = on_end
        self.tail_sampling = tail_sampling if tail_sampling is not None and tail_sampling.is_on else None
        self._ids = ids
        self._attributes = dict(attributes or {})
        self._sampler = sampler

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[trace.Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> trace.Span:
        around = trace.get_current_span(context)
        held = around.held if isinstance(around, PlainSpan) else None
        parent: trace.SpanContext | None = around.get_span_context()
        if parent is not None and parent.is_valid:
            trace_id, state = parent.trace_id, parent.trace_state
        else:
            parent, trace_id, state = None, self._ids.generate_trace_id(), None
        is_sampled = held is None and self._samples(context, parent, trace_id, name, kind, attributes, links)
        flags = _SAMPLED if is_sampled else _NOT_SAMPLED
        own = trace.SpanContext(trace_id, self._ids.generate_span_id(), False, flags, state)
        is_first = False
        if not is_sampled and held is None:
            if self.tail_sampling is None or isinstance(around, PlainSpan):
                return trace.NonRecordingSpan(parent or own)
            held, is_first = HeldSpans(), True
        both = {**self._attributes, **attributes} if attributes else self._attributes.copy()
        begun = PlainSpan(self, name, own, parent, both, kind, links or (), start_time or time.time_ns())
        begun.held, begun.is_first = held, is_first
        return begun

    def _samples(
        self,
        context: Context | None,
        parent: trace.SpanContext | None,
        trace_id: int,
        name: str,
        kind: trace.SpanKind,
        attributes: Attributes,
        links: Sequence[trace.Link] | None,
    ) -> bool:
        if self._sampler is None:
            return parent is None or bool(parent.trace_flags.sampled)
        asked = self._sampler.should_sample(context, trace_id, name, kind, attributes, links)
        return asked.decision is Decision.RECORD_AND_SAMPLE

    @_agnosticcontextmanager
    def start_as_current_span(
        self,
        name: str,
        context: Context | None = None,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[trace.Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        end_on_exit: bool = True,
    ) -> Iterator[trace.Span]:
        started = self.start_span(name, context, kind, attributes, links, start_time)
        with trace.use_span(started, end_on_exit, record_exception, set_status_on_exception) as active:
            yield active


class PlainSpan(trace.Span):
    """One span until it ends; later attributes are lost."""

    held: "HeldSpans[PlainSpan] | None" = (
        None  # where it waits for the end of its request; None: it is sampled
    )
    is_first = False  # of a request whose spans are held: its end decides about all of them

    def __init__(
        self,
        tracer: PlainTracer,
        name: str,
        context: trace.SpanContext,
        parent: trace.SpanContext | None,
        attributes: dict[str, AttributeValue],
        kind: trace.SpanKind,
        links: Sequence[trace.Link],
        start_ns: int,
    ) -> None:
        self._tracer: PlainTracer | None = tracer  # None: it has ended
        self._name = name
        self._context = context
        self._parent = parent
        self._attributes = attributes
        self._kind = kind
        self._links = [*links]
        self._start_ns = start_ns
        self._end_ns = start_ns
        self._events: list[Event] = []
        self._status = _UNSET

    def end(self, end_time: int | None = None) -> None:
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return
        self._end_ns = end_time or time.time_ns()
        if self.held is None:
            tracer.on_end(self.as_ended(tracer))
        elif not self.is_first:
            self.held.add(self)
        else:
            self._end_request(tracer, self.held)

    def _end_request(self, tracer: PlainTracer, held: "HeldSpans[PlainSpan]") -> None:
        spans, rule = held.take(), tracer.tail_sampling
        is_error = self._status.status_code is trace.StatusCode.ERROR
        duration_ns = self._end_ns - self._start_ns
        reason = None if rule is None else rule.reason(is_error=is_error, duration_ns=duration_ns)
        if reason is None:
            return
        self._attributes[KEPT_FOR] = reason
        for span in (*spans, self):
            tracer.on_end(span.as_ended(tracer))

    def as_ended(self, tracer: PlainTracer) -> ReadableSpan:
        context = self._context
        if not context.trace_flags.sampled:  # it is now; processors pass over others
            context = trace.SpanContext(
                context.trace_id, context.span_id, False, _SAMPLED, context.trace_state
            )
        return ReadableSpan(
            name=self._name,
            context=context,
            parent=self._parent,
            resource=tracer.resource,
            attributes=self._attributes,
            events=self._events,
            links=self._links,
            kind=self._kind,
            status=self._status,
            start_time=self._start_ns,
            end_time=self._end_ns,
            instrumentation_scope=tracer.scope,
        )

    def get_span_context(self) -> trace.SpanContext:
        return self._context

    def is_recording(self) -> bool:
        return self._tracer is not None

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        if self._tracer is not None:
            self._attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        if self._tracer is not None:
            self._attributes.update(attributes)

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        self._events.append(Event(name, attributes, timestamp))

    def add_link(self, context: trace.SpanContext, attributes: Attributes = None) -> None:
        self._links.append(trace.Link(context, attributes))

    def update_name(self, name: str) -> None:
        self._name = name

    def set_status(self, status: trace.Status | trace.StatusCode, description: str | None = None) -> None:
        """Set the status: OK is final, and no status is unset."""
        new = status if isinstance(status, trace.Status) else trace.Status(status, description)
        if (self._status.is_ok and not self._status.is_unset) or new.is_unset:
            return
        self._status = new

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        fields: dict[str, AttributeValue] = {
            "exception.type": type(exception).__qualname__,
            "exception.message": str(exception),
            "exception.stacktrace": "".join(traceback.format_exception(exception)),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", {**fields, **(attributes or {})}, timestamp)


_UNSET = trace.Status(trace.StatusCode.UNSET)


class active_span:  # noqa: N801 - used as a function
    """Block in which `started` is the current span; an exception marks it failed, and it ends with the block.

    As `opentelemetry.trace.use_span`, without its two generators, and without the exception's text and
    traceback, which may hold what a caller wrote, or a whole URL. The log has them.
    """

    __slots__ = ("_span", "_token")

    def __init__(self, started: trace.Span) -> None:
        self._span = started

    def __enter__(self) -> trace.Span:
        self._token = otel_context.attach(trace.set_span_in_context(self._span))
        return self._span

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        otel_context.detach(self._token)
        if isinstance(error, Exception) and self._span.is_recording():
            name, code = type(error).__qualname__, getattr(error, "code", None)
            self._span.add_event("exception", {"exception.type": name})
            description = f"{name}: {code}" if isinstance(code, str) else name
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, description))
        self._span.end()
