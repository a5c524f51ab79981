"""Request at the instances of its route, until the first token of its answer arrives.

The prefill instance gets the request with one token to generate, which is dropped: the decode instance makes
it again from the same KV cache. Fields that shape the prompt stay, so that both have the same one. All other
options of tokens and of the answer go to the decode instance alone.

    one instance   asked --first event--> answering
    a pair         asked to prefill --KV cache kept--> asked to decode --first token--> answering

Nothing has been sent to the client until then, so whatever fails can begin again elsewhere
(`StageFailedError`), from the prefill on: a KV cache is handed over once. Only one that a draining instance
did not take is offered to another. While a request decodes, nothing of it is left at the instance that has
prefilled: the decode instance has read its KV cache, or had it dropped. If the caller leaves between both,
the KV cache is kept until its lease ends.

The first event of an instance that decodes is a token's: its host holds answers back until its engine has put
something out (`triptych_prefill_decode.kv_errors`).
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import ClientSession

from triptych_common.domain.errors import RequestError, TriptychError
from triptych_common.protocol.messages import InstanceRecord
from triptych_common.telemetry import span, trace_headers
from triptych_gateway.decision.encode_decisions import EncodeDecisions
from triptych_gateway.decision.namespace_decisions import Answering
from triptych_gateway.endpoints.endpoint import ChatForm, Endpoint, EndpointKind, ServedBy
from triptych_gateway.errors import unavailable
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.proxy.context import UpstreamRequest
from triptych_gateway.proxy.sse import cut_at_error
from triptych_gateway.proxy.upstream import (
    Answer,
    BrokenOffError,
    DrainingError,
    UnreachableError,
    first_event_error,
    open_answer,
)
from triptych_gateway.request.chat_request import run_parse
from triptych_gateway.routing.router import Router
from triptych_gateway.routing.routes import Route, RouteReason
from triptych_gateway.routing.scheduling.candidates import ServingStage
from triptych_gateway.tracing.answer_facts import object_in, object_of

PARAMS = "kv_transfer_params"
ASKED_OF_PREFILL: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# A token is made, and no answer sent: these would have it refused, or cost time in vain.
ONLY_FOR_DECODE = frozenset(
    {
        "stream", "stream_options", "stream_interval",
        "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens",
        "stop", "stop_sequences", "stop_token_ids",
        "n", "best_of", "logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs", "echo",
        "include", "return_token_ids", "return_tokens_as_token_ids", "return_token_offsets",
        "store", "background",
    }
)  # fmt: skip
_ONE_TOKEN: Mapping[ChatForm, Mapping[str, Any]] = {
    ChatForm.COMPLETIONS: {"max_tokens": 1},
    ChatForm.MESSAGES: {"max_tokens": 1},
    ChatForm.RESPONSES: {"max_output_tokens": 1, "store": False},
}
# Of `POST /v1/completions`: several prompts in one request.
_PROMPT = "prompt"
# Each would need a KV cache of its own, or what is computed where the KV cache is not.
_NOT_ONE = ("n", "best_of")
_UNDIVIDED = (
    "use_beam_search",
    "prompt_logprobs",
    "echo",
    "truncate_prompt_tokens",  # by the number of tokens that may be made
    "background",
    "previous_response_id",
)
PRIORITY_HEADER = "X-Vllm-Priority"  # vLLM's, before the body's field
BROKE_OFF = "broke_off"  # while it had the request
PREFIX_NOT_HELD = "prefix_not_held"  # from the decode instance: an item would have to be computed
KV_FAILURES = frozenset({PREFIX_NOT_HELD, "kv_load_failed", "kv_taken"})  # codes from the decode instance
ITEM_FAILURE_GRACE_S = 0.1


def undivided_field(endpoint: Endpoint, body: Mapping[str, Any]) -> str | None:
    """Return the first field that prevents disaggregation of the request, or None."""
    if endpoint.served_by is not ServedBy.STAGES:
        return None
    for name in _NOT_ONE:
        if body.get(name) not in (None, 1):
            return name
    for name in _UNDIVIDED:
        value = body.get(name)
        if value is not None and value is not False:
            return name
    if body.get("truncation") not in (None, "disabled"):
        return "truncation"
    if endpoint.kind is EndpointKind.GENERATE and _has_several(body.get(_PROMPT)):
        return _PROMPT
    return None


def _has_several(prompt: Any) -> bool:
    """Return whether there are several prompts or none: no text and no list of token ids."""
    return isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt)


def prefill_body(body: bytes, endpoint: Endpoint) -> bytes:
    """Return the body for prefill. Takes as long as parsing: milliseconds per MB."""
    fields = {name: value for name, value in orjson.loads(body).items() if name not in ONLY_FOR_DECODE}
    one_token = dict(_ONE_TOKEN[endpoint.chat_form])
    if endpoint.chat_form is ChatForm.COMPLETIONS and endpoint.kind is EndpointKind.CHAT:
        one_token["max_completion_tokens"] = 1
    return orjson.dumps({**fields, **one_token, "stream": False, PARAMS: ASKED_OF_PREFILL})


def handover_of(answer: bytes) -> dict[str, Any] | None:
    """Return the place of the KV cache from the prefill's answer; None if it keeps none."""
    return object_of(object_in(answer).get(PARAMS)) or None


def decode_body(body: bytes, handover: Mapping[str, Any]) -> bytes:
    """Return `body`, a JSON object without such a field, with the place of the KV cache."""
    return body.rstrip()[:-1] + b',"' + PARAMS.encode() + b'":' + orjson.dumps(handover) + b"}"


def without_handover(answer: bytes) -> bytes:
    """Return a whole answer without the fields that engines exchange."""
    if b'"kv_transfer_params":{' not in answer:  # in text its quotes would be escaped
        return answer
    parsed = orjson.loads(answer)
    parsed.pop(PARAMS, None)
    return orjson.dumps(parsed)


class StageFailedError(TriptychError):
    """An instance of the route failed before an answer began."""

    def __init__(
        self,
        record: InstanceRecord,
        stage: ServingStage,
        reason: str,
        detail: str,
        error: RequestError | None = None,
    ) -> None:
        """Store the failure; `error` is for the caller if no other instance does better."""
        super().__init__(detail)
        self.record, self.stage, self.reason, self.error = record, stage, reason, error
        self.handover: dict[str, Any] | None = None  # place of a KV cache that it has not taken


@dataclass(frozen=True, slots=True)
class Stages:
    http: ClientSession
    router: Router
    decisions: EncodeDecisions
    metrics: GatewayMetrics
    threads: Executor
    max_answer_bytes: int  # of one that is not streamed
    tokenize_turns: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """Lock per instance: its server tokenizes in one thread, for which prompts wait too."""

    async def begin(
        self, upstream: UpstreamRequest, route: Route, handover: dict[str, Any] | None = None
    ) -> tuple[Answer, ExitStack]:
        """Return the answer at its first event; close the stack at its end.

        On failure nothing stays open, and nothing counted.

        Args:
            handover: place of the KV cache that `route.first` has computed before.

        Raises:
            StageFailedError: another route may be tried.
            RequestError: the request was refused, or its time is up.
        """
        with ExitStack() as held:
            if route.decode is not None:
                held.enter_context(self._counted(upstream, route.decode))  # from now on: others go elsewhere
                if handover is None:
                    handover = await self._prefill(upstream, route.first)
                try:
                    answer = await self._decode(upstream, route.decode, decode_body(upstream.body, handover))
                except StageFailedError as error:
                    if error.reason == "draining":
                        error.handover = handover
                    raise
                held.push(answer)
            elif route.reason is RouteReason.PREFIX_HELD:
                held.enter_context(self._counted(upstream, route.first))
                answer = await self._decode(upstream, route.first, upstream.body)
                held.push(answer)
            else:
                answer, answering = await self._ask(
                    upstream, route.first, upstream.body, held, ServingStage.WHOLE
                )
                answering.on_first_token(is_stream=upstream.request.stream)
            return answer, held.pop_all()

    # ---- the stages ------------------------------------------------------------------------------
    async def _prefill(self, upstream: UpstreamRequest, record: InstanceRecord) -> dict[str, Any]:
        """Run the prefill and return the place of the KV cache."""
        began_at = time.monotonic()
        body = await run_parse(
            self.threads, len(upstream.body), lambda: prefill_body(upstream.body, upstream.endpoint)
        )
        with ExitStack() as held, span("gateway.prefill", attributes={"triptych.prefill": record.instance}):
            answer, answering = await self._ask(upstream, record, body, held, ServingStage.PREFILL)
            answering.on_first_token(is_stream=True)  # its answer is a token
            handover = handover_of(answer.first)
        self.metrics.prefill_stage_s.observe(time.monotonic() - began_at)
        if upstream.item_wait is not None:
            upstream.item_wait.on_prefilled(record.instance)
        if handover is None:
            error = unavailable("handover_failed", "the prefill instance keeps no KV cache")
            raise StageFailedError(record, ServingStage.PREFILL, "no_handover", error.message, error)
        return handover

    async def _decode(self, upstream: UpstreamRequest, record: InstanceRecord, body: bytes) -> Answer:
        stage = ServingStage.DECODE
        with span("gateway.decode", attributes={"triptych.decode": record.instance}):
            async with _first_token_limit(upstream):
                answer = await self._open(upstream, record, body, stage)
            if not upstream.request.stream:
                answer.first = without_handover(answer.first)
                return answer
            _, fault = cut_at_error(answer.first)
            if fault is None:
                return answer
            answer.close()
            error = first_event_error(fault, upstream.endpoint)
            if error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise StageFailedError(record, stage, "failed", error.message, error)
            raise error

    # ---- one instance ----------------------------------------------------------------------------
    async def _ask(
        self,
        upstream: UpstreamRequest,
        record: InstanceRecord,
        body: bytes,
        held: ExitStack,
        stage: ServingStage,
    ) -> tuple[Answer, Answering]:
        """Send one stage's request; it is counted and measured until `held` is closed."""
        held.enter_context(self._counted(upstream, record))
        answering = Answering()
        if upstream.endpoint.is_computed:
            num_prompt_bytes = upstream.request.num_prompt_bytes
            answering = self.decisions.begin_request(record, upstream.estimate, num_prompt_bytes)
        held.callback(answering.end)
        if upstream.endpoint.kind is EndpointKind.TOKENIZE:
            async with self.tokenize_turns[record.instance]:
                answer = await self._open(upstream, record, body, stage)
        else:
            async with _first_token_limit(upstream):
                answer = await self._open(upstream, record, body, stage)
        held.push(answer)
        return answer, answering

    async def _open(
        self, upstream: UpstreamRequest, record: InstanceRecord, body: bytes, stage: ServingStage
    ) -> Answer:
        headers = {"X-Request-Id": upstream.context.request_id, **trace_headers()}
        headers["Content-Type"] = upstream.content_type
        if upstream.context.priority:
            headers[PRIORITY_HEADER] = str(upstream.context.priority)  # the Messages API has no field for it
        try:
            return await open_answer(
                self.http,
                record.url or "",
                body,
                headers,
                upstream.endpoint,
                stream=upstream.request.stream and stage is not ServingStage.PREFILL,
                path=upstream.path,
                max_bytes=self.max_answer_bytes,
            )
        except DrainingError as error:
            raise StageFailedError(record, stage, "draining", str(error)) from error
        except UnreachableError as error:
            reason = BROKE_OFF if isinstance(error, BrokenOffError) else "unreachable"
            if error.code == PREFIX_NOT_HELD:
                reason = PREFIX_NOT_HELD
            elif stage is ServingStage.DECODE and error.code in KV_FAILURES:
                reason = "handover_failed"
            raise StageFailedError(record, stage, reason, str(error)) from error
        except RequestError as error:
            if stage is not ServingStage.DECODE:  # there no item is waited for
                await _prefer_item_failure(upstream, error)
            if error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR and stage is not ServingStage.WHOLE:
                raise StageFailedError(record, stage, "failed", error.message, error) from error
            raise

    @contextmanager
    def _counted(self, upstream: UpstreamRequest, record: InstanceRecord) -> Iterator[None]:
        self.router.begin_request(record.instance, upstream.routing, time.monotonic())
        is_computed = True
        try:
            yield
        except (StageFailedError, RequestError):
            is_computed = False
            raise
        finally:
            now = time.monotonic()
            self.router.end_request(record.instance, upstream.routing, now, is_computed=is_computed)


@asynccontextmanager
async def _first_token_limit(upstream: UpstreamRequest) -> AsyncIterator[None]:
    """Bound the wait for the first token, which only a stream shows; others have the request's limit."""
    if not upstream.request.stream:
        yield
        return
    limit_s = upstream.context.first_token_deadline - time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise RequestError(504, "deadline_exceeded", "no token arrived in time") from error


async def _prefer_item_failure(upstream: UpstreamRequest, error: RequestError) -> None:
    """Raise an item's failure instead if prefill_decode gave up because of it.

    Both come from the same event by different ways; the one over the bus may be a little later. And
    prefill_decode gives up by itself what still waits for an item at the deadline that was sent to it.
    """
    if upstream.item_wait is None or error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
        return
    if time.monotonic() >= upstream.item_wait.deadline:
        raise unavailable("deadline_exceeded", "the media were not encoded in time") from error
    try:
        async with asyncio.timeout(ITEM_FAILURE_GRACE_S):
            await upstream.item_wait.wait_failure()
    except TimeoutError:
        return
