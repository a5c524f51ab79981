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
from triptych_gateway.decision.prefixes import HeldPrefixes
from triptych_gateway.endpoints.endpoint import Endpoint, ServedBy
from triptych_gateway.endpoints.table import TOKENIZE_PATH
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.proxy.audio_request import AudioRequest
from triptych_gateway.proxy.context import UpstreamRequest
from triptych_gateway.proxy.stages import (
    BROKE_OFF,
    KV_FAILURES,
    PREFIX_NOT_HELD,
    StageFailedError,
    Stages,
    undivided_field,
)
from triptych_gateway.proxy.streaming import (
    ClientStream,
    InterruptedStreamError,
    TokenTimes,
    relay_stream,
    relay_whole,
)
from triptych_gateway.proxy.upstream import Answer
from triptych_gateway.proxy.upstream_body import named_body
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.content_parts import modality_of
from triptych_gateway.request.forms.grammar_bounds import named_as_sent
from triptych_gateway.request.prompt_length import check_tokenized_text
from triptych_gateway.request.text_request import TextRequest
from triptych_gateway.routing.instances import Incarnation, Instances, LostRequests, incarnation_of
from triptych_gateway.routing.pairs import announced
from triptych_gateway.routing.routes import InstanceDemand, Route, RouteChoice, RouteMode, RouteReason
from triptych_gateway.routing.scheduling.candidates import ServingStage
from triptych_gateway.routing.variants import VariantReason
from triptych_gateway.transfers.transfer_orders import TransferOrders

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Forwarder:
    instances: Instances
    stages: Stages
    transfers: TransferOrders
    metrics: GatewayMetrics
    chunk_timeout_s: float
    held: HeldPrefixes = field(default_factory=HeldPrefixes)
    lost: LostRequests = field(default_factory=LostRequests)

    async def forward(self, upstream: UpstreamRequest, client: ClientStream) -> Route:
        """Send a request, wait for its first token, relay the answer, and return the route that answered.

        Raises:
            RequestError: any failure; `client.has_begun` decides whether it must go into the stream.
        """
        with span("gateway.first_token") as waiting:
            route, answer, held = await self._first_answer(upstream)
            waiting.set_attribute("triptych.prefill_decode", route.answering.instance)
        with held:
            if upstream.context.on_answer is not None:
                await upstream.context.on_answer(upstream, route.answering)
            try:
                await self._relay(upstream, route, answer, client)
            except InterruptedStreamError:
                self._note_lost(upstream, incarnation_of(route.answering))
                raise
        if self.lost:
            self.lost.discard(*_same_request(upstream))
        if upstream.item_wait is not None and upstream.endpoint.is_computed and route.decode is None:
            upstream.item_wait.on_answered(route.first.instance)  # its engine had the items
        self._remember(upstream, route)
        return route

    async def _first_answer(self, upstream: UpstreamRequest) -> tuple[Route, Answer, ExitStack]:
        """Try routes until one answers, and have the router count the request there."""
        prior = upstream.context.prior
        if self.lost and not self.instances.settings.resend_to_last_instance:
            self.lost.check(*_same_request(upstream))
        choice = RouteChoice(
            self.instances,
            demand_of(
                upstream.request,
                upstream.endpoint,
                upstream.namespace_digest,
                needs_tower=upstream.needs_tower,
                takes=upstream.takes,
            ),
            first=upstream.first_choice,
            only=None if prior is None else prior.record,
            held_by=self._held_by(upstream),
            routing=upstream.routing,
            asked=upstream.context.demand,
            variant=upstream.context.variant,
            variant_reason=(
                upstream.context.variant_reason if prior is None else VariantReason.STORED_RESPONSE
            ),
            losses=upstream.context.losses,
        )
        if choice.losses.lives:  # by the count of its tokens
            self._note_lost(upstream, *choice.losses.lives)
        again: Route | None = None  # of the same KV cache
        handover: dict[str, Any] | None = None
        while True:
            route = again or await choice.next_route()
            self._check(upstream, route)
            upstream.context.root.on_route(route.mode.value, route.reason.value)
            self.metrics.routes.labels(route.mode.value, route.reason.value).inc()
            if upstream.item_wait is not None:
                await self.transfers.bring(upstream.item_wait, route.first)
            try:
                answer, held = await self.stages.begin(upstream, route, handover)
            except StageFailedError as error:
                self._on_failed(upstream, route, choice, error)
                again = None if error.handover is None else choice.pick_decode(route)
                handover = None if again is None else error.handover
            except RequestError as error:
                named = named_as_sent(error, upstream.request.body)
                if named is error:
                    raise
                raise named from error
            else:
                if upstream.item_wait is not None:
                    upstream.item_wait.on_answer_began()
                self._show_version(upstream, route.answering, choice.variant_reason)
                return route, answer, held

    def _show_version(
        self, upstream: UpstreamRequest, record: InstanceRecord, reason: VariantReason | None
    ) -> None:
        version, shown = record.model_version or "", (reason or VariantReason.ONLY_ONE).value
        upstream.context.root.on_version(version, shown)
        self.metrics.versions.count(record.model or "", version, shown)

    def _check(self, upstream: UpstreamRequest, route: Route) -> None:
        """Check limits that only the chosen instances announce."""
        for record in (route.first, route.answering):
            upstream.request.check_placeholders(record.placeholder_tokens)
        if upstream.endpoint.path == TOKENIZE_PATH:
            check_tokenized_text(upstream.request.num_prompt_bytes, route.first.max_model_len)

    def _on_failed(
        self, upstream: UpstreamRequest, route: Route, choice: RouteChoice, error: StageFailedError
    ) -> None:
        record = error.record
        fields = {"instance": record.instance, "request_id": upstream.context.request_id}
        if error.stage is not ServingStage.WHOLE:
            self.metrics.stage_retries.labels(error.stage.value, error.reason).inc()
        if error.reason == "draining":
            log.info("prefill_decode is draining", **fields)
            choice.on_draining(record)
        elif error.reason == PREFIX_NOT_HELD and route.reason is RouteReason.PREFIX_HELD:
            log.info("decode instance holds the prefix no more", **fields)  # such a route is chosen once
        elif error.reason in KV_FAILURES or error.reason == "handover_failed":
            log.warning("decode instance did not take over", error=str(error), **fields)
            choice.on_handover_failed(route)
        elif error.reason == BROKE_OFF:
            choice.on_broke_off(record)
            self._note_lost(upstream, incarnation_of(record))
            num_lost = len(choice.losses.lives)
            log.warning(
                "instance broke off while it had a request",
                error=str(error),
                num_lost=num_lost,
                **upstream.context.caller.fields,
                **fields,
            )
        elif error.error is not None:
            log.warning("instance failed at a stage", error=str(error), **fields)
            choice.on_failed(record, error.error)
        else:
            log.warning("prefill_decode not reachable", error=str(error), **fields)
            choice.on_unreachable(record)

    def _note_lost(self, upstream: UpstreamRequest, *lives: Incarnation) -> None:
        """Note instances that ended with the request, except those that were told to end: they cut it off."""
        told = {incarnation_of(each) for each in self.instances.view.records if each.draining}
        if ended := set(lives) - told:
            self.lost.add(ended, *_same_request(upstream))

    # ---- conversations that an instance holds ----------------------------------------------------
    def _held_by(self, upstream: UpstreamRequest) -> Incarnation | None:
        request = upstream.request
        if not self.instances.view.serving_of(request.model, ServingStage.DECODE):
            return None
        if not isinstance(request, ChatRequest) or not _may_be_held(upstream):
            return None
        return self.held.find(request, () if upstream.item_wait is None else upstream.item_wait.items)

    def _remember(self, upstream: UpstreamRequest, route: Route) -> None:
        request = upstream.request
        if (
            route.mode is RouteMode.WHOLE
            or not isinstance(request, ChatRequest)
            or not _may_be_held(upstream)
        ):
            return
        items = () if upstream.item_wait is None else upstream.item_wait.items
        record = route.answering
        self.held.remember(request, items, incarnation_of(record))

    async def _relay(
        self, upstream: UpstreamRequest, route: Route, answer: Answer, client: ClientStream
    ) -> None:
        record = route.answering
        context, item_wait = upstream.context, upstream.item_wait
        sealed_at = None if item_wait is None else item_wait.sealed_at
        modality = modality_of(upstream.request.media)
        series = self.metrics.latencies.of(upstream.endpoint.path, record.model or "", modality)
        times = TokenTimes(series, context.at, upstream.endpoint.chat_form)
        context.root.on_answering(record.instance, times)
        if upstream.request.stream:
            context.root.on_first_chunk(sealed_at)
            with span("gateway.stream") as streaming:
                num_chunks = await relay_stream(
                    answer, client, self.chunk_timeout_s, times, context.root.facts
                )
                streaming.set_attribute("triptych.num_chunks", num_chunks)
        else:
            context.root.on_whole_answer(answer.first, sealed_at)
            await relay_whole(answer, client, self.chunk_timeout_s)
        times.on_end()


def demand_of(
    request: ChatRequest | AudioRequest | TextRequest,
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


def _same_request(upstream: UpstreamRequest) -> tuple[bytes, bytes, bytes]:
    """Return key, path and body, which two requests share if a caller sends the same one twice."""
    owner, path = upstream.context.caller.owner, upstream.path or upstream.endpoint.path
    request, body = upstream.request, upstream.body
    if upstream.items and isinstance(request, ChatRequest):
        body = named_body(request, upstream.items)
    return owner.encode(), path.encode(), body


def _may_be_held(upstream: UpstreamRequest) -> bool:
    """Return whether an instance may hold the request's conversation, with its items named as before."""
    endpoint = upstream.endpoint
    if endpoint.served_by is not ServedBy.STAGES or upstream.context.prior is not None:
        return False
    return not upstream.needs_tower and undivided_field(endpoint, upstream.request.body) is None
