"""Gateway's span of a whole request: `{operation} {model}`, kind SERVER.

The model's name is added once it is known to be served, so that a caller cannot make names up. Attributes are
short and hold no text of the request or the answer.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode
from starlette.types import Scope

from triptych_common.protocol.ids import MmHash
from triptych_common.telemetry import span
from triptych_common.telemetry.span_records import REQUEST_ID, STAGE_PREFIX, STAGE_SUFFIX
from triptych_gateway.endpoints.answer_cost import num_prompts
from triptych_gateway.tracing import attributes
from triptych_gateway.tracing.answer_facts import AnswerFacts
from triptych_gateway.tracing.recent_requests import RecentRequest, RecentRequests, TokenCount
from triptych_gateway.tracing.timings import FirstTokenStages, ItemTiming, Stage
from triptych_gateway.tracing.trace_trust import address_of

_INT64 = 1 << 63  # what OTLP can hold


def _int(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -_INT64 <= value < _INT64 else None


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


_PARAMETERS: dict[str, tuple[str, Callable[[object], int | float | None]]] = {
    "max_tokens": (attributes.REQUEST_MAX_TOKENS, _int),
    "max_output_tokens": (attributes.REQUEST_MAX_TOKENS, _int),
    "max_completion_tokens": (attributes.REQUEST_MAX_TOKENS, _int),  # its successor, which counts
    "temperature": (attributes.REQUEST_TEMPERATURE, _float),
    "top_p": (attributes.REQUEST_TOP_P, _float),
    "top_k": (attributes.REQUEST_TOP_K, _int),
    "seed": (attributes.REQUEST_SEED, _int),
    "frequency_penalty": (attributes.REQUEST_FREQUENCY_PENALTY, _float),
    "presence_penalty": (attributes.REQUEST_PRESENCE_PENALTY, _float),
}


def parameters_of(body: Mapping[str, Any]) -> dict[str, int | float]:
    """Return attributes of the parameters that `body` sets; others than numbers are left out."""
    found: dict[str, int | float] = {}
    for name, (attribute, read) in _PARAMETERS.items():
        if name in body and (value := read(body[name])) is not None:
            found[attribute] = value
    num_choices = _int(body.get("n"))
    if num_choices is not None and num_choices != 1:
        found[attributes.REQUEST_CHOICE_COUNT] = num_choices
    stop = body.get("stop") or body.get("stop_sequences")
    if isinstance(stop, (str, list)):
        found[attributes.NUM_STOP_SEQUENCES] = 1 if isinstance(stop, str) else len(stop)
    return found


PROVIDER = "vllm"  # no name of the conventions' own fits; others are allowed
MAX_ERROR_CHARS = 64
CUT_OFF = 503  # as the status of a request that the gateway's end has ended
_STAGES = {stage: f"{STAGE_PREFIX}{stage}{STAGE_SUFFIX}" for stage in Stage}


class RequestSpan:
    """Span of one request, filled in by the steps of the exchange as they end."""

    def __init__(self, started: Span, operation: str, arrived_at: float) -> None:
        self._span = started
        self._operation = operation
        self._stages = FirstTokenStages(arrived_at)
        self._is_recording = started.is_recording()
        self._recent: RecentRequest | None = None  # None: `/ui` is off, or the key is not checked yet
        self.facts: AnswerFacts | None = None  # facts of the answer; None: not recorded

    def set_attribute(self, name: str, value: str | bool | int | float) -> None:
        self._span.set_attribute(name, value)

    def show_in(
        self, recents: RecentRequests, request_id: str, route: str, *, owner: str, key_name: str | None
    ) -> None:
        """Show the request among the recent ones; `owner` is the caller's whose key was checked."""
        self._recent = recents.begin_request(request_id, route, owner, self._stages)
        self._recent.key_name = key_name

    def on_request(self, body: Mapping[str, Any], *, stream: bool, num_items: int) -> None:
        self.end_stage(Stage.BODY)
        if self._is_recording:
            parameters = parameters_of(body)
            self._span.set_attributes(
                {attributes.NUM_ITEMS: num_items, attributes.REQUEST_STREAM: stream, **parameters}
            )
            num_choices = int(parameters.get(attributes.REQUEST_CHOICE_COUNT, 1))
            self.facts = AnswerFacts(num_choices * num_prompts(body))
        if self._recent is not None:
            self._recent.is_stream, self._recent.num_items = stream, num_items
            self.facts = self.facts or AnswerFacts()
            self._recent.touch()

    def on_model(self, model: str) -> None:
        self.end_stage(Stage.QUEUE)
        self._span.set_attribute(attributes.REQUEST_MODEL, model)
        self._span.update_name(f"{self._operation} {model}")
        if self._recent is not None:
            self._recent.model = model
            self._recent.touch()

    def end_stage(self, stage: Stage) -> None:
        """End `stage`, which lasted since the previous end."""
        self._stages.end(stage, time.monotonic())
        if self._recent is not None:
            self._recent.touch()

    def on_items(self, items: Iterable[tuple[MmHash, str, int]]) -> dict[MmHash, ItemTiming]:
        """Record identity, modality and bytes of the checked media; return timings to fill in, if traced."""
        if self._recent is None:
            return {}
        timings: dict[MmHash, ItemTiming] = {}
        for mm_hash, modality, num_bytes in items:
            if mm_hash in timings:
                timings[mm_hash].num_places += 1
            else:
                timings[mm_hash] = ItemTiming(modality, num_bytes)
        self._recent.items = timings
        return timings

    def on_decision(self, way: str, reason: str) -> None:
        self._span.set_attribute(attributes.DECISION, way)
        self._span.set_attribute(attributes.DECISION_REASON, reason)
        self._on_way(way, reason)

    def on_route(self, way: str, reason: str) -> None:
        """Record the instances that get the request, one or a pair. The last call counts."""
        self._span.set_attribute(attributes.WAY, way)
        self._span.set_attribute(attributes.WAY_REASON, reason)

    def on_version(self, version: str, reason: str) -> None:
        """Record the version of the answering instance; "" if it announces none."""
        self._span.set_attribute(attributes.VERSION, version)
        self._span.set_attribute(attributes.VERSION_REASON, reason)

    def on_local_encode(self, reason: str) -> None:
        self._span.set_attribute(attributes.LOCAL_ENCODE, reason)
        self._on_way("local", reason)

    def on_local_encode_failed(self) -> None:
        self._span.set_attribute(attributes.LOCAL_ENCODE_FAILED, True)
        self._on_way("remote", "local_encode_failed")

    def on_answering(self, instance: str, tokens: TokenCount) -> None:
        """Record that `instance` answers; `tokens` counts those of a stream as they pass."""
        if self._recent is not None:
            self._recent.instance = instance
            self._recent.tokens = tokens if self._recent.is_stream else None
            self._recent.touch()

    def on_first_chunk(self, sealed_at: float | None) -> None:
        """Record the first chunk of a stream."""
        seconds = self._stages.end_first_chunk(sealed_at, time.monotonic())
        self._span.set_attributes(
            {attributes.SERVER_TIME_TO_FIRST_TOKEN: seconds, attributes.RESPONSE_TIME_TO_FIRST_CHUNK: seconds}
        )
        if self._recent is not None:
            self._recent.first_token_at = self._stages.last_at
            self._recent.touch()

    def on_whole_answer(self, body: bytes, sealed_at: float | None) -> None:
        """Record an answer that is not streamed, whose first token has no known time."""
        if sealed_at is not None:
            self._stages.end_encode(sealed_at, time.monotonic())
        if self.facts is not None:
            self.facts.feed_whole(body)

    def on_error(self, error_type: str) -> None:
        self._span.set_attribute(attributes.ERROR_TYPE, error_type[:MAX_ERROR_CHARS])
        if self._recent is not None:
            self._recent.error_type = error_type[:MAX_ERROR_CHARS]

    def end(self, status: int) -> None:
        self._span.set_attribute(attributes.HTTP_STATUS, status)
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        found = {} if self.facts is None else self.facts.attributes()
        self._span.set_attributes(found)
        if self._is_recording:
            self._span.set_attributes({_STAGES[stage]: ms for stage, ms in self._stages.as_ms().items()})
        if self._recent is not None:
            self._recent.num_prompt_tokens = _number(found.get(attributes.USAGE_INPUT_TOKENS))
            self._recent.num_answer_tokens = _number(found.get(attributes.USAGE_OUTPUT_TOKENS))
            self._recent.end(status, time.monotonic())

    def close(self) -> None:
        """Close the span; without `end` before, the request was cut off."""
        if self._recent is not None:
            self._recent.end(CUT_OFF, time.monotonic())

    def _on_way(self, way: str, reason: str) -> None:
        if self._recent is not None:
            self._recent.way, self._recent.reason = way, reason
            self._recent.touch()


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


@contextmanager
def request_span(
    request_id: str, *, operation: str, route: str, scope: Scope, arrived_at: float, context: Context
) -> Iterator[RequestSpan]:
    """Run the block in the span; its parent is the caller's span, if `context` has one."""
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
        root = RequestSpan(started, operation, arrived_at)
        try:
            yield root
        finally:
            root.close()
