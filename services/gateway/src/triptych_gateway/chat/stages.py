"""Request at the instances of its route, until the first token of its answer arrives.

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
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from aiohttp import ClientSession

from triptych_common.domain.errors import RequestError, TriptychError
from triptych_common.protocol.messages import InstanceRecord
from triptych_common.telemetry import span, trace_headers
from triptych_gateway.chat.dispatch import Dispatch
from triptych_gateway.chat.sse import cut_at_error
from triptych_gateway.chat.stage_bodies import decode_body, handover_of, prefill_body, without_handover
from triptych_gateway.chat.upstream import (
    Answer,
    BrokenOffError,
    DrainingError,
    UnreachableError,
    first_event_error,
    open_answer,
)
from triptych_gateway.decision.encode_decisions import EncodeDecisions
from triptych_gateway.decision.namespace_decisions import Answering
from triptych_gateway.endpoints.endpoint import EndpointKind
from triptych_gateway.errors import unavailable
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.request.chat_request import run_parse
from triptych_gateway.routing.router import Router, ServingStage
from triptych_gateway.routing.routes import Route
from triptych_gateway.routing.ways import WayReason

PRIORITY_HEADER = "X-Vllm-Priority"  # vLLM's, before the body's field
BROKE_OFF = "broke_off"  # while it had the request
PREFIX_NOT_HELD = "prefix_not_held"  # from the decode instance: an item would have to be computed
KV_FAILURES = frozenset({PREFIX_NOT_HELD, "kv_load_failed", "kv_taken"})  # codes from the decode instance
ITEM_FAILURE_GRACE_S = 0.1


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
    """Stages of one gateway's requests."""

    http: ClientSession
    router: Router
    decisions: EncodeDecisions
    metrics: GatewayMetrics
    threads: Executor
    max_answer_bytes: int  # of one that is not streamed
    tokenize_turns: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """Lock per instance: its server tokenizes in one thread, for which prompts wait too."""

    async def begin(
        self, dispatch: Dispatch, route: Route, handover: dict[str, Any] | None = None
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
                held.enter_context(self._counted(dispatch, route.decode))  # from now on: others go elsewhere
                if handover is None:
                    handover = await self._prefill(dispatch, route.first)
                try:
                    answer = await self._decode(dispatch, route.decode, decode_body(dispatch.body, handover))
                except StageFailedError as error:
                    if error.reason == "draining":
                        error.handover = handover
                    raise
                held.push(answer)
            elif route.reason is WayReason.PREFIX_HELD:
                held.enter_context(self._counted(dispatch, route.first))
                answer = await self._decode(dispatch, route.first, dispatch.body)
                held.push(answer)
            else:
                answer, answering = await self._ask(
                    dispatch, route.first, dispatch.body, held, ServingStage.WHOLE
                )
                answering.on_first_token(is_stream=dispatch.request.stream)
            return answer, held.pop_all()

    # ---- the stages ------------------------------------------------------------------------------
    async def _prefill(self, dispatch: Dispatch, record: InstanceRecord) -> dict[str, Any]:
        """Run the prefill and return the place of the KV cache."""
        began_at = time.monotonic()
        body = await run_parse(
            self.threads, len(dispatch.body), lambda: prefill_body(dispatch.body, dispatch.endpoint)
        )
        with ExitStack() as held, span("gateway.prefill", attributes={"triptych.prefill": record.instance}):
            answer, answering = await self._ask(dispatch, record, body, held, ServingStage.PREFILL)
            answering.on_first_token(is_stream=True)  # its answer is a token
            handover = handover_of(answer.first)
        self.metrics.prefill_stage_s.observe(time.monotonic() - began_at)
        if dispatch.media_wait is not None:
            dispatch.media_wait.on_prefilled(record.instance)
        if handover is None:
            error = unavailable("handover_failed", "the prefill instance keeps no KV cache")
            raise StageFailedError(record, ServingStage.PREFILL, "no_handover", error.message, error)
        return handover

    async def _decode(self, dispatch: Dispatch, record: InstanceRecord, body: bytes) -> Answer:
        stage = ServingStage.DECODE
        with span("gateway.decode", attributes={"triptych.decode": record.instance}):
            async with _first_token_limit(dispatch):
                answer = await self._open(dispatch, record, body, stage)
            if not dispatch.request.stream:
                answer.first = without_handover(answer.first)
                return answer
            _, fault = cut_at_error(answer.first)
            if fault is None:
                return answer
            answer.close()
            error = first_event_error(fault, dispatch.endpoint)
            if error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise StageFailedError(record, stage, "failed", error.message, error)
            raise error

    # ---- one instance ----------------------------------------------------------------------------
    async def _ask(
        self, dispatch: Dispatch, record: InstanceRecord, body: bytes, held: ExitStack, stage: ServingStage
    ) -> tuple[Answer, Answering]:
        """Send one stage's request; it is counted and measured until `held` is closed."""
        held.enter_context(self._counted(dispatch, record))
        answering = Answering()
        if dispatch.endpoint.is_computed:
            num_prompt_bytes = dispatch.request.num_prompt_bytes
            answering = self.decisions.begin_request(record, dispatch.course, num_prompt_bytes)
        held.callback(answering.end)
        if dispatch.endpoint.kind is EndpointKind.TOKENIZE:
            async with self.tokenize_turns[record.instance]:
                answer = await self._open(dispatch, record, body, stage)
        else:
            async with _first_token_limit(dispatch):
                answer = await self._open(dispatch, record, body, stage)
        held.push(answer)
        return answer, answering

    async def _open(
        self, dispatch: Dispatch, record: InstanceRecord, body: bytes, stage: ServingStage
    ) -> Answer:
        headers = {"X-Request-Id": dispatch.arrival.request_id, **trace_headers()}
        headers["Content-Type"] = dispatch.content_type
        if dispatch.arrival.priority:
            headers[PRIORITY_HEADER] = str(dispatch.arrival.priority)  # the Messages API has no field for it
        try:
            return await open_answer(
                self.http,
                record.url or "",
                body,
                headers,
                dispatch.endpoint,
                stream=dispatch.request.stream and stage is not ServingStage.PREFILL,
                path=dispatch.path,
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
                await _prefer_item_failure(dispatch, error)
            if error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR and stage is not ServingStage.WHOLE:
                raise StageFailedError(record, stage, "failed", error.message, error) from error
            raise

    @contextmanager
    def _counted(self, dispatch: Dispatch, record: InstanceRecord) -> Iterator[None]:
        self.router.begin_request(record.instance, dispatch.routing)
        is_computed = True
        try:
            yield
        except (StageFailedError, RequestError):
            is_computed = False
            raise
        finally:
            self.router.end_request(record.instance, dispatch.routing, is_computed=is_computed)


@asynccontextmanager
async def _first_token_limit(dispatch: Dispatch) -> AsyncIterator[None]:
    """Bound the wait for the first token, which only a stream shows; others have the request's limit."""
    if not dispatch.request.stream:
        yield
        return
    limit_s = dispatch.arrival.first_token_deadline - time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise RequestError(504, "deadline_exceeded", "no token arrived in time") from error


async def _prefer_item_failure(dispatch: Dispatch, error: RequestError) -> None:
    """Raise an item's failure instead if prefill_decode gave up because of it.

    Both come from the same event by different ways; the one over the bus may be a little later. And
    prefill_decode gives up by itself what still waits for an item at the deadline that was sent to it.
    """
    if dispatch.media_wait is None or error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
        return
    if time.monotonic() >= dispatch.media_wait.deadline:
        raise unavailable("deadline_exceeded", "the media were not encoded in time") from error
    try:
        async with asyncio.timeout(ITEM_FAILURE_GRACE_S):
            await dispatch.media_wait.wait_failure()
    except TimeoutError:
        return
