"""Send a prepared request to the instances of its route, and their answer to the client.

An instance that cannot be reached costs the caller nothing but time: `routing.routes` gives the next route to
try. An instance that ends while it has the request may have ended because of it: such a request is sent again
once at most.
"""

from collections.abc import Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import InstanceRecord, Modality
from triptych_common.telemetry import get_logger, span
from triptych_gateway.chat.dispatch import Dispatch
from triptych_gateway.chat.sound_request import SoundRequest
from triptych_gateway.chat.stage_bodies import undivided_field
from triptych_gateway.chat.stages import BROKE_OFF, KV_FAILURES, PREFIX_NOT_HELD, StageFailedError, Stages
from triptych_gateway.chat.streaming import (
    ClientStream,
    InterruptedStreamError,
    relay_stream,
    relay_whole,
)
from triptych_gateway.chat.token_times import TokenTimes
from triptych_gateway.chat.upstream import Answer
from triptych_gateway.decision.held_prefixes import HeldPrefixes
from triptych_gateway.endpoints.endpoint import Endpoint, ServedBy
from triptych_gateway.endpoints.table import TOKENIZE_PATH
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.content_parts import modality_of
from triptych_gateway.request.forms.grammar_bounds import named_as_sent
from triptych_gateway.request.prompt_length import check_tokenized_text
from triptych_gateway.request.text_request import TextRequest
from triptych_gateway.routing.instances import Instances, Life, life_of
from triptych_gateway.routing.lost_requests import LostRequests, without_own_fields
from triptych_gateway.routing.pairs import announced
from triptych_gateway.routing.router import ServingStage
from triptych_gateway.routing.routes import InstanceDemand, Route, RouteChoice
from triptych_gateway.routing.variants import VariantReason
from triptych_gateway.routing.ways import Way, WayReason
from triptych_gateway.transfers.transfer_orders import TransferOrders

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Forwarder:
    """Forwarder of one gateway's requests."""

    instances: Instances
    stages: Stages
    transfers: TransferOrders
    metrics: GatewayMetrics
    chunk_timeout_s: float
    held: HeldPrefixes = field(default_factory=HeldPrefixes)
    lost: LostRequests = field(default_factory=LostRequests)

    async def forward(self, dispatch: Dispatch, client: ClientStream) -> Route:
        """Send a request, wait for its first token, relay the answer, and return the route that answered.

        Raises:
            RequestError: any failure; `client.has_begun` decides whether it must go into the stream.
        """
        with span("gateway.first_token") as waiting:
            route, answer, held = await self._first_answer(dispatch)
            waiting.set_attribute("triptych.prefill_decode", route.answering.instance)
        with held:
            if dispatch.arrival.on_answer is not None:
                await dispatch.arrival.on_answer(dispatch, route.answering)
            try:
                await self._relay(dispatch, route, answer, client)
            except InterruptedStreamError:
                self._note_lost(dispatch, life_of(route.answering))
                raise
        if self.lost:
            self.lost.discard(*_same_request(dispatch))
        if dispatch.media_wait is not None and dispatch.endpoint.is_computed and route.decode is None:
            dispatch.media_wait.answered_by = route.first.instance  # its engine had the items
        self._remember(dispatch, route)
        return route

    async def _first_answer(self, dispatch: Dispatch) -> tuple[Route, Answer, ExitStack]:
        """Try routes until one answers, and have the router count the request there."""
        prior = dispatch.arrival.prior
        if self.lost and not self.instances.resends_to_last:
            self.lost.check(*_same_request(dispatch))
        choice = RouteChoice(
            self.instances,
            demand_of(
                dispatch.request,
                dispatch.endpoint,
                dispatch.namespace_digest,
                needs_tower=dispatch.needs_tower,
                takes=dispatch.takes,
            ),
            first=dispatch.first_choice,
            only=None if prior is None else prior.record,
            held_by=self._held_by(dispatch),
            routing=dispatch.routing,
            asked=dispatch.arrival.demand,
            variant=dispatch.arrival.variant,
            variant_reason=(
                dispatch.arrival.variant_reason if prior is None else VariantReason.STORED_RESPONSE
            ),
            losses=dispatch.arrival.losses,
        )
        if choice.losses.lives:  # by the count of its tokens
            self._note_lost(dispatch, *choice.losses.lives)
        again: Route | None = None  # of the same KV cache
        handover: dict[str, Any] | None = None
        while True:
            route = again or await choice.next_route()
            self._check(dispatch, route)
            dispatch.arrival.root.on_route(route.way.value, route.reason.value)
            self.metrics.routes.labels(route.way.value, route.reason.value).inc()
            if dispatch.media_wait is not None:
                await self.transfers.bring(dispatch.media_wait, route.first)
            try:
                answer, held = await self.stages.begin(dispatch, route, handover)
            except StageFailedError as error:
                self._on_failed(dispatch, route, choice, error)
                again = None if error.handover is None else choice.pick_decode(route)
                handover = None if again is None else error.handover
            except RequestError as error:
                named = named_as_sent(error, dispatch.request.body)
                if named is error:
                    raise
                raise named from error
            else:
                if dispatch.media_wait is not None:
                    dispatch.media_wait.settle()
                self._show_version(dispatch, route.answering, choice.variant_reason)
                return route, answer, held

    def _show_version(self, dispatch: Dispatch, record: InstanceRecord, reason: VariantReason | None) -> None:
        version, shown = record.model_version or "", (reason or VariantReason.ONLY_ONE).value
        dispatch.arrival.root.on_version(version, shown)
        self.metrics.versions.count(record.model or "", version, shown)

    def _check(self, dispatch: Dispatch, route: Route) -> None:
        """Check limits that only the chosen instances announce."""
        for record in (route.first, route.answering):
            dispatch.request.check_placeholders(record.placeholder_tokens)
        if dispatch.endpoint.path == TOKENIZE_PATH:
            check_tokenized_text(dispatch.request.num_prompt_bytes, route.first.max_model_len)

    def _on_failed(
        self, dispatch: Dispatch, route: Route, choice: RouteChoice, error: StageFailedError
    ) -> None:
        record = error.record
        fields = {"instance": record.instance, "request_id": dispatch.arrival.request_id}
        if error.stage is not ServingStage.WHOLE:
            self.metrics.stage_retries.labels(error.stage.value, error.reason).inc()
        if error.reason == "draining":
            log.info("prefill_decode is draining", **fields)
            choice.on_draining(record)
        elif error.reason == PREFIX_NOT_HELD and route.reason is WayReason.PREFIX_HELD:
            log.info("decode instance holds the prefix no more", **fields)  # such a route is chosen once
        elif error.reason in KV_FAILURES or error.reason == "handover_failed":
            log.warning("decode instance did not take over", error=str(error), **fields)
            choice.on_handover_failed(route)
        elif error.reason == BROKE_OFF:
            choice.on_broke_off(record)
            self._note_lost(dispatch, life_of(record))
            num_lost = len(choice.losses.lives)
            log.warning(
                "instance broke off while it had a request",
                error=str(error),
                num_lost=num_lost,
                **dispatch.arrival.caller.fields,
                **fields,
            )
        elif error.error is not None:
            log.warning("instance failed at a stage", error=str(error), **fields)
            choice.on_failed(record, error.error)
        else:
            log.warning("prefill_decode not reachable", error=str(error), **fields)
            choice.on_unreachable(record)

    def _note_lost(self, dispatch: Dispatch, *lives: Life) -> None:
        """Note instances that ended with the request, except those that were told to end: they cut it off."""
        told = {life_of(each) for each in self.instances.view.records if each.draining}
        if ended := set(lives) - told:
            self.lost.add(ended, *_same_request(dispatch))

    # ---- conversations that an instance holds ----------------------------------------------------
    def _held_by(self, dispatch: Dispatch) -> Life | None:
        request = dispatch.request
        if not self.instances.view.serving_of(request.model, ServingStage.DECODE):
            return None
        if not isinstance(request, ChatRequest) or not _may_be_held(dispatch):
            return None
        return self.held.find(request, () if dispatch.media_wait is None else dispatch.media_wait.items)

    def _remember(self, dispatch: Dispatch, route: Route) -> None:
        request = dispatch.request
        if route.way is Way.WHOLE or not isinstance(request, ChatRequest) or not _may_be_held(dispatch):
            return
        items = () if dispatch.media_wait is None else dispatch.media_wait.items
        record = route.answering
        self.held.remember(request, items, (record.instance, record.boot_id))

    async def _relay(self, dispatch: Dispatch, route: Route, answer: Answer, client: ClientStream) -> None:
        record = route.answering
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


def demand_of(
    request: ChatRequest | SoundRequest | TextRequest,
    endpoint: Endpoint,
    namespace_digest: str | None = None,
    *,
    needs_tower: bool = False,
    takes: Set[Modality] = frozenset(),
) -> InstanceDemand:
    """Return the demand of a request on instances; without `namespace_digest`, of text only."""
    if needs_tower:
        takes = takes | announced({part.modality for part in request.media})
    name = undivided_field(endpoint, request.body)
    return InstanceDemand(
        request.model,
        namespace_digest,
        endpoint.served_by if name is None else ServedBy.ALONE,
        name,
        has_media=bool(request.media),
        needs_tower=needs_tower,
        takes=takes,
    )


def _same_request(dispatch: Dispatch) -> tuple[bytes, bytes, bytes]:
    """Return key, path and body, which two requests share if a caller sends the same one twice."""
    owner, path = dispatch.arrival.caller.owner, dispatch.path or dispatch.endpoint.path
    has_metadata = dispatch.media_wait is not None
    return owner.encode(), path.encode(), without_own_fields(dispatch.body) if has_metadata else dispatch.body


def _may_be_held(dispatch: Dispatch) -> bool:
    """Return whether an instance may hold the request's conversation, with its items named as before."""
    endpoint = dispatch.endpoint
    if endpoint.served_by is not ServedBy.STAGES or dispatch.arrival.prior is not None:
        return False
    return not dispatch.needs_tower and undivided_field(endpoint, dispatch.request.body) is None
