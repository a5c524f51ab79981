"""Sends a prepared request to prefill_decode, and its answer to the client.

An instance that cannot be reached, or goes away before its first chunk, costs the caller nothing
but time: `routing.instances` gives the next one to try.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import ClientSession

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import RequestId
from triptych_common.protocol.messages import InstanceRecord, Modality
from triptych_common.telemetry import get_logger, span, trace_headers
from triptych_gateway.access.callers import Caller
from triptych_gateway.access.key_limiter import RequestCharge
from triptych_gateway.chat.sound_request import SoundRequest
from triptych_gateway.chat.streaming import ClientStream, relay_stream, relay_whole
from triptych_gateway.chat.token_times import TokenTimes
from triptych_gateway.chat.upstream import Answer, DrainingError, UnreachableError, open_answer
from triptych_gateway.decision.courses import Course
from triptych_gateway.decision.encode_decisions import Answering, EncodeDecisions
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.endpoints.endpoint import Endpoint, EndpointKind
from triptych_gateway.endpoints.table import CHAT, TOKENIZE_PATH
from triptych_gateway.errors import unavailable
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.content_parts import modality_of
from triptych_gateway.request.prompt_length import check_tokenized_text
from triptych_gateway.request.text_request import TextRequest
from triptych_gateway.routing.instances import Choice, Instances
from triptych_gateway.routing.route_demand import ANYWHERE, RouteDemand
from triptych_gateway.routing.variants import Variant, VariantReason
from triptych_gateway.tracing.request_span import RequestSpan

log = get_logger(__name__)

PRIORITY_HEADER = "X-Vllm-Priority"  # vLLM's, before the body's field

ITEM_FAILURE_GRACE_S = 0.1


@dataclass(frozen=True, slots=True)
class PriorResponse:
    """The stored response that a request goes on from: one instance has it."""

    record: InstanceRecord
    has_raw_media: bool  # it keeps media as data URLs: further ones are sent alike


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as it arrived."""

    request_id: RequestId
    caller: Caller
    root: RequestSpan
    at: float  # monotonic seconds
    first_token_deadline: float  # monotonic seconds; whole answers are bound by the request's own limit
    charge: RequestCharge | None = None  # None: the caller's key has no limits
    prior: PriorResponse | None = None  # None: any instance will do
    on_answer: "OnAnswer | None" = None  # awaited when an answer has begun, before any of it is sent
    priority: int = 0  # lower is earlier; the caller's key's, or what the request asked for beyond that
    demand: RouteDemand = ANYWHERE
    variant: Variant | None = None  # of its model, for which its media are named; None: it has no media
    variant_reason: VariantReason | None = None


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What is sent to prefill_decode, and to which instances it may go."""

    arrival: Arrival
    request: ChatRequest | SoundRequest | TextRequest
    body: bytes
    namespace_digest: str | None = None  # None: text only, any namespace
    needs_tower: bool = False  # the media are sent raw
    takes: Modality | None = None  # to an instance that takes raw items of this modality
    media_wait: MediaWait | None = None  # the media are sent as metadata
    first_choice: InstanceRecord | None = None
    course: Course | None = None  # None: no media
    endpoint: Endpoint = CHAT
    path: str | None = None  # with a query, if there is one; None: the endpoint's
    content_type: str = "application/json"


OnAnswer = Callable[[Dispatch, InstanceRecord], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Forwarder:
    """One per gateway."""

    http: ClientSession
    instances: Instances
    decisions: EncodeDecisions
    metrics: GatewayMetrics
    chunk_timeout_s: float
    max_answer_bytes: int  # of one that is not streamed
    tokenize_turns: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """By instance: its server tokenizes in one thread, which prompts wait for too."""

    async def forward(self, dispatch: Dispatch, client: ClientStream) -> InstanceRecord:
        """Send, wait for the first chunk, relay to the end. Returns the record of who answered.

        Raises:
            RequestError: whatever went wrong; `client.has_begun` decides whether it must go into the stream.
        """
        with span("gateway.first_token") as waiting:
            record, answer, answering = await self._first_answer(dispatch)
            waiting.set_attribute("triptych.prefill_decode", record.instance)
        try:
            with answer:
                if dispatch.arrival.on_answer is not None:
                    await dispatch.arrival.on_answer(dispatch, record)
                await self._relay(dispatch, record, answer, client)
        finally:
            answering.end()
            self.instances.router.end_request(record.instance)
        if dispatch.media_wait is not None and dispatch.endpoint.is_computed:  # its engine had the items
            dispatch.media_wait.answered_by = record.instance
        return record

    async def _first_answer(self, dispatch: Dispatch) -> tuple[InstanceRecord, Answer, Answering]:
        """Of the instances that may serve the request, the first that answers; the router counts it there."""
        model, digest = dispatch.request.model, dispatch.namespace_digest
        prior = dispatch.arrival.prior
        only = None if prior is None else prior.record
        choice = Choice(
            self.instances,
            model,
            digest,
            dispatch.first_choice,
            dispatch.needs_tower,
            only,
            dispatch.takes,
            dispatch.arrival.demand,
            dispatch.arrival.variant,
            dispatch.arrival.variant_reason if prior is None else VariantReason.STORED_RESPONSE,
        )
        while True:
            record = await choice.next_instance()
            dispatch.request.check_placeholders(record.placeholder_tokens)
            if dispatch.endpoint.path == TOKENIZE_PATH:
                check_tokenized_text(dispatch.request.num_prompt_bytes, record.max_model_len)
            fields = {"instance": record.instance, "request_id": dispatch.arrival.request_id}
            try:
                answer, answering = await self._begin(dispatch, record)
            except DrainingError:
                log.info("prefill_decode is draining", **fields)
                choice.on_draining()
            except UnreachableError as error:
                log.warning("prefill_decode not reachable", error=str(error), **fields)
                choice.on_unreachable(record)
            else:
                if dispatch.media_wait is not None:
                    dispatch.media_wait.settle()
                self._show_version(dispatch, record, choice.reason)
                return record, answer, answering

    def _show_version(self, dispatch: Dispatch, record: InstanceRecord, reason: VariantReason | None) -> None:
        """Which one answers, and why."""
        version, shown = record.model_version or "", (reason or VariantReason.ONLY_ONE).value
        dispatch.arrival.root.on_version(version, shown)
        self.metrics.versions.count(record.model or "", version, shown)

    async def _begin(self, dispatch: Dispatch, record: InstanceRecord) -> tuple[Answer, Answering]:
        """The answer at its first chunk. On failure nothing stays open, and nothing counted."""
        headers = {"X-Request-Id": dispatch.arrival.request_id, **trace_headers()}
        headers["Content-Type"] = dispatch.content_type
        if dispatch.arrival.priority:
            headers[PRIORITY_HEADER] = str(dispatch.arrival.priority)  # the Messages API has no field for it
        stream, router = dispatch.request.stream, self.instances.router
        # Only a stream shows its first token; a whole answer is bound by the request's own limit.
        limit_s = dispatch.arrival.first_token_deadline - time.monotonic() if stream else None
        router.begin_request(record.instance)
        answering = Answering()
        try:
            if dispatch.endpoint.is_computed:
                num_prompt_bytes = dispatch.request.num_prompt_bytes
                answering = self.decisions.begin_request(record, dispatch.course, num_prompt_bytes)
            if dispatch.endpoint.kind is EndpointKind.TOKENIZE:
                async with self.tokenize_turns[record.instance]:
                    answer = await self._open(dispatch, record, headers)
            else:
                async with asyncio.timeout(limit_s):
                    answer = await self._open(dispatch, record, headers)
        except BaseException as error:
            answering.end()
            router.end_request(record.instance)
            if isinstance(error, TimeoutError):
                raise RequestError(504, "deadline_exceeded", "no token came in time") from error
            if isinstance(error, RequestError):
                await _prefer_item_failure(dispatch, error)
            raise
        answering.on_first_token(is_stream=stream)
        return answer, answering

    async def _open(self, dispatch: Dispatch, record: InstanceRecord, headers: dict[str, str]) -> Answer:
        return await open_answer(
            self.http,
            record.url or "",
            dispatch.body,
            headers,
            dispatch.endpoint,
            stream=dispatch.request.stream,
            path=dispatch.path,
            max_bytes=self.max_answer_bytes,
        )

    async def _relay(
        self, dispatch: Dispatch, record: InstanceRecord, answer: Answer, client: ClientStream
    ) -> None:
        arrival, media_wait = dispatch.arrival, dispatch.media_wait
        sealed_at = None if media_wait is None else media_wait.sealed_at
        modality = modality_of(dispatch.request.media)
        series = self.metrics.latencies.of(dispatch.endpoint.path, record.model or "", modality)
        times = TokenTimes(series, arrival.at, dispatch.endpoint.chat_form)
        arrival.root.on_answering(record.instance, times)
        if dispatch.request.stream:
            arrival.root.on_first_chunk(sealed_at)
            with span("gateway.stream") as streaming:
                num_chunks = await relay_stream(
                    answer, client, self.chunk_timeout_s, times, arrival.root.facts
                )
                streaming.set_attribute("triptych.num_chunks", num_chunks)
        else:
            arrival.root.on_whole_answer(answer.first, sealed_at)
            await relay_whole(answer, client, self.chunk_timeout_s)
        times.on_end()


async def _prefer_item_failure(dispatch: Dispatch, error: RequestError) -> None:
    """When prefill_decode gave up because an item failed, the item's failure is the better answer.

    Both come from the same event by different ways; the one over the bus may be a little later. And
    prefill_decode gives up by itself what still waits for an item at the deadline that was sent to it.
    """
    if dispatch.media_wait is None or error.status_code < 500:
        return
    if time.monotonic() >= dispatch.media_wait.deadline:
        raise unavailable("deadline_exceeded", "the media were not there in time") from error
    try:
        async with asyncio.timeout(ITEM_FAILURE_GRACE_S):
            await dispatch.media_wait.wait_failure()
    except TimeoutError:
        return
