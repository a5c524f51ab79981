"""The gateway's span of a whole request: `{operation} {model}`, kind SERVER.

The name of the model is added once it is known to be served: a caller can make no names up. Whatever is set
is short, and holds nothing of what the request or the answer says.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode
from starlette.types import Scope

from triptych_common.telemetry import span
from triptych_common.telemetry.span_records import REQUEST_ID, STAGE_PREFIX, STAGE_SUFFIX
from triptych_gateway.tracing import attributes
from triptych_gateway.tracing.answer_facts import AnswerFacts
from triptych_gateway.tracing.parameters import num_prompts, parameters_of
from triptych_gateway.tracing.stages import FirstTokenStages, Stage
from triptych_gateway.tracing.trace_trust import address_of

PROVIDER = "vllm"  # no name of the conventions' own fits; others are allowed
MAX_ERROR_CHARS = 64
_STAGES = {stage: f"{STAGE_PREFIX}{stage}{STAGE_SUFFIX}" for stage in Stage}


class RequestSpan:
    """One request's. Filled in by the steps of the exchange as they end."""

    def __init__(self, started: Span, operation: str, arrived_at: float) -> None:
        self._span = started
        self._operation = operation
        self._stages = FirstTokenStages(arrived_at)
        self._is_recording = started.is_recording()
        self.facts: AnswerFacts | None = None  # of the answer; None: no span will have them

    def set_attribute(self, name: str, value: str | bool | int | float) -> None:
        self._span.set_attribute(name, value)

    def on_request(self, body: Mapping[str, Any], *, stream: bool, num_items: int) -> None:
        """The body has been read, and is valid here."""
        self.end_stage(Stage.BODY)
        if self._is_recording:
            parameters = parameters_of(body)
            self._span.set_attributes(
                {attributes.NUM_ITEMS: num_items, attributes.REQUEST_STREAM: stream, **parameters}
            )
            num_choices = int(parameters.get(attributes.REQUEST_CHOICE_COUNT, 1))
            self.facts = AnswerFacts(num_choices * num_prompts(body))

    def on_model(self, model: str) -> None:
        """An instance serves `model`."""
        self.end_stage(Stage.QUEUE)
        self._span.set_attribute(attributes.REQUEST_MODEL, model)
        self._span.update_name(f"{self._operation} {model}")

    def end_stage(self, stage: Stage) -> None:
        """What has passed since the last end was `stage`."""
        self._stages.end(stage, time.monotonic())

    def on_first_chunk(self, sealed_at: float | None) -> None:
        """Of a stream."""
        seconds = self._stages.end_first_chunk(sealed_at, time.monotonic())
        self._span.set_attributes(
            {
                attributes.SERVER_TIME_TO_FIRST_TOKEN: seconds,
                attributes.RESPONSE_TIME_TO_FIRST_CHUNK: seconds,
            }
        )

    def on_whole_answer(self, body: bytes, sealed_at: float | None) -> None:
        """An answer that is not streamed: when its first token was there is not known."""
        if sealed_at is not None:
            self._stages.end_encode(sealed_at, time.monotonic())
        if self.facts is not None:
            self.facts.feed_whole(body)

    def on_error(self, error_type: str) -> None:
        """A code of the gateway's errors."""
        self._span.set_attribute(attributes.ERROR_TYPE, error_type[:MAX_ERROR_CHARS])

    def end(self, status: int) -> None:
        """The answer has ended, whatever it was."""
        self._span.set_attribute(attributes.HTTP_STATUS, status)
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        if self.facts is not None:
            self._span.set_attributes(self.facts.attributes())
        if self._is_recording:
            self._span.set_attributes({_STAGES[stage]: ms for stage, ms in self._stages.as_ms().items()})


@contextmanager
def request_span(
    request_id: str,
    *,
    operation: str,
    route: str,
    scope: Scope,
    arrived_at: float,
    context: Context,
) -> Iterator[RequestSpan]:
    """Active in the block; the parent is the caller's span, if `context` has one."""
    address = address_of(scope)
    first = {
        REQUEST_ID: request_id,
        attributes.OPERATION_NAME: operation,
        attributes.PROVIDER_NAME: PROVIDER,
        attributes.HTTP_METHOD: scope["method"],
        attributes.HTTP_ROUTE: route,
        attributes.URL_SCHEME: scope.get("scheme", "http"),
        **({} if address is None else {attributes.CLIENT_ADDRESS: str(address)}),
    }
    with span(operation, context=context, kind=SpanKind.SERVER, attributes=first) as started:
        yield RequestSpan(started, operation, arrived_at)
