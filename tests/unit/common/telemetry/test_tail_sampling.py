"""What is kept of a request whose trace is not sampled: all spans of this process, or none."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from triptych_common.telemetry.plain_spans import (
    KEPT_FOR,
    MAX_HELD_SPANS,
    PlainTracer,
    TailSampling,
    active_span,
)

MS = 1_000_000


def tracer_of(rule: TailSampling | None, ended: list[ReadableSpan]) -> PlainTracer:
    return PlainTracer(
        "tests",
        Resource.create(),
        RandomIdGenerator(),
        {},
        ended.append,
        sampler=ALWAYS_OFF,
        tail_sampling=rule,
    )


def run_request(tracer: PlainTracer, *, took_ms: float = 1.0, fails: bool = False, children: int = 2) -> None:
    """A first span with children, of which the last is a child of a child."""
    root = tracer.start_span("chat m", start_time=1)
    context = trace.set_span_in_context(root)
    for number in range(children):
        with active_span(tracer.start_span(f"child {number}", context)) as child:
            assert not child.get_span_context().trace_flags.sampled, "other processes are told so"
            if number == children - 1:
                tracer.start_span("grandchild").end()
    if fails:
        root.set_status(trace.StatusCode.ERROR)
    root.end(1 + int(took_ms * MS))


@pytest.mark.parametrize(
    ("rule", "took_ms", "fails", "reason"),
    [
        (TailSampling(errors=True), 5.0, True, "error"),
        (TailSampling(errors=True), 5e6, False, None),
        (TailSampling(errors=False, slow_ms=5.0), 5.0, False, "slow"),
        (TailSampling(errors=False, slow_ms=5.0), 4.9, True, None),
        (TailSampling(errors=True, slow_ms=5.0), 9.0, True, "error"),
        (TailSampling(errors=False), 9.0, True, None),
        (None, 9.0, True, None),
    ],
)
def test_all_or_none(rule: TailSampling | None, took_ms: float, fails: bool, reason: str | None) -> None:
    ended: list[ReadableSpan] = []
    run_request(tracer_of(rule, ended), took_ms=took_ms, fails=fails)
    if reason is None:
        assert ended == []
        return
    assert sorted(span.name for span in ended) == ["chat m", "child 0", "child 1", "grandchild"]
    assert len({span.context.trace_id for span in ended if span.context}) == 1
    assert all(span.context and span.context.trace_flags.sampled for span in ended), "else they are dropped"
    (root,) = [span for span in ended if span.parent is None]
    assert (root.attributes or {})[KEPT_FOR] == reason
    assert [span for span in ended if KEPT_FOR in (span.attributes or {})] == [root]


def test_a_caller_that_does_not_sample_is_followed_and_its_failures_are_kept() -> None:
    ended: list[ReadableSpan] = []
    tracer = tracer_of(TailSampling(), ended)
    remote = trace.NonRecordingSpan(trace.SpanContext(7, 8, is_remote=True))
    for fails in (False, True):
        with active_span(tracer.start_span("chat", trace.set_span_in_context(remote))) as root:
            assert root.get_span_context().trace_id == 7
            if fails:
                root.set_status(trace.StatusCode.ERROR)
    (kept,) = ended
    assert kept.parent is not None
    assert kept.parent.span_id == 8


def test_what_ends_after_its_request_is_lost_and_nothing_is_kept_for_it() -> None:
    ended: list[ReadableSpan] = []
    tracer = tracer_of(TailSampling(), ended)
    root = tracer.start_span("chat")
    late = tracer.start_span("gateway.fetch", trace.set_span_in_context(root))
    root.set_status(trace.StatusCode.ERROR)
    root.end()
    late.end()
    assert [span.name for span in ended] == ["chat"]


def test_a_request_holds_so_many_spans() -> None:
    ended: list[ReadableSpan] = []
    run_request(tracer_of(TailSampling(), ended), fails=True, children=MAX_HELD_SPANS + 10)
    assert len(ended) == MAX_HELD_SPANS + 1
    assert ended[-1].name == "chat m"
