"""Plain spans: what reaches an exporter is what OpenTelemetry's own would have been."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from triptych_common.domain.errors import RequestError
from triptych_common.telemetry.plain_spans import PlainTracer, active_span


@pytest.fixture
def ended() -> list[ReadableSpan]:
    return []


@pytest.fixture
def tracer(ended: list[ReadableSpan]) -> PlainTracer:
    return PlainTracer("tests", Resource.create({"a": "b"}), RandomIdGenerator(), {"own": "x"}, ended.append)


def test_parents_attributes_and_times(tracer: PlainTracer, ended: list[ReadableSpan]) -> None:
    with active_span(tracer.start_span("outer", attributes={"num": 1})) as outer:
        assert trace.get_current_span() is outer
        with tracer.start_as_current_span("inner") as inner:
            inner.set_attribute("late", True)
    assert trace.get_current_span() is trace.INVALID_SPAN
    first, second = ended
    assert (first.name, second.name) == ("inner", "outer")
    assert first.attributes == {"own": "x", "late": True}
    assert second.attributes == {"own": "x", "num": 1}
    assert first.parent == second.context
    assert second.parent is None
    assert first.context is not None
    assert second.context is not None
    assert first.context.trace_id == second.context.trace_id
    assert first.context.span_id != second.context.span_id
    assert (second.start_time or 0) <= (first.start_time or 0) <= (first.end_time or 0)
    assert first.resource.attributes["a"] == "b"


@pytest.mark.parametrize(
    ("error", "description"),
    [
        (LookupError("what a caller wrote"), "LookupError"),
        (RequestError(400, "invalid_image", "what a caller wrote"), "RequestError: invalid_image"),
    ],
)
def test_an_exception_marks_it_failed_and_goes_on(
    tracer: PlainTracer, ended: list[ReadableSpan], error: Exception, description: str
) -> None:
    """Its text stays out: it may be a caller's, or a whole URL."""
    with pytest.raises(type(error)), active_span(tracer.start_span("a")):
        raise error
    (span,) = ended
    assert (span.status.status_code, span.status.description) == (trace.StatusCode.ERROR, description)
    (event,) = span.events
    assert event.attributes == {"exception.type": type(error).__qualname__}
    assert "caller" not in span.to_json()


def test_nothing_is_set_after_the_end_and_it_ends_once(
    tracer: PlainTracer, ended: list[ReadableSpan]
) -> None:
    span = tracer.start_span("a", start_time=5)
    span.set_status(trace.StatusCode.OK)
    span.set_status(trace.StatusCode.ERROR, "too late")
    span.end(7)
    span.end()
    span.set_attribute("late", True)
    (one,) = ended
    assert (one.start_time, one.end_time, one.status.status_code) == (5, 7, trace.StatusCode.OK)
    assert one.attributes == {"own": "x"}
    assert not span.is_recording()


def test_a_trace_that_is_not_sampled_stays_so(tracer: PlainTracer, ended: list[ReadableSpan]) -> None:
    parent = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=True))
    span = tracer.start_span("a", trace.set_span_in_context(parent))
    span.end()
    assert span.get_span_context().trace_id == 1
    assert not ended
