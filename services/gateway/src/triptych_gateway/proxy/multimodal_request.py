"""MultimodalRequest: the life of one request with media, whose encoders are elsewhere.

media taken -> decided --remote--> sizes known -> forwarded with metadata -> answered
                  | ^                  |                  |
                  | |                  `--- no encoder ---+--> forwarded whole
                  | `--no answer begun--.
                  `--local--------------+--> forwarded whole, to an instance with a vision tower -> answered

Each way is tried at most once in a variant of the model, and each variant at most once. Items are named for
one namespace, so all of a try goes to one variant: `RequestContext.variant`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus

from triptych_common.domain.errors import RequestError
from triptych_common.domain.fair_queue import FairKey
from triptych_common.protocol.messages import InstanceRecord
from triptych_common.telemetry import current_traceparent, get_logger, span
from triptych_gateway.access.request_limiter import Booking
from triptych_gateway.decision.decision_policy import DecisionMode
from triptych_gateway.decision.encode_decisions import DecidedRequest
from triptych_gateway.decision.prediction import CostEstimate, CostKind
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.errors import EncodeUnavailableError
from triptych_gateway.files.file_service import files_not_enabled
from triptych_gateway.proxy.attempt import Attempt, EncodeWait
from triptych_gateway.proxy.context import RequestContext, UpstreamRequest, encode_class_of
from triptych_gateway.proxy.forward import demand_of
from triptych_gateway.proxy.routing import chat_routing
from triptych_gateway.proxy.services import Services
from triptych_gateway.proxy.streaming import ClientStream
from triptych_gateway.proxy.upstream_body import book_whole, check_fits, media_body, whole_body
from triptych_gateway.race import race
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.content_parts import modality_of
from triptych_gateway.request.item_checks import check_counts
from triptych_gateway.request.media import TakenItem
from triptych_gateway.request.prompt_length import check_prompt_length
from triptych_gateway.routing.router import SERVING_ROLES, TOWER_ROLES
from triptych_gateway.routing.routes import RouteChoice
from triptych_gateway.routing.scheduling.candidates import RoutingRequest
from triptych_gateway.routing.variants import RankedVariants, Variant, VariantReason
from triptych_gateway.tracing.timings import Stage

log = get_logger(__name__)

LEFT_CODES = frozenset({"no_instance", "instance_unreachable", "no_encoder"})
"""Error codes that mean that no instance is left in the version of the request."""


class MultimodalRequest:
    """One request with media, from its media's text to the end of the answer. Its methods are its steps."""

    def __init__(
        self,
        services: Services,
        request: ChatRequest,
        context: RequestContext,
        booking: Booking,
        client: ClientStream,
    ) -> None:
        self._services, self._media, self._instances = services, services.media, services.instances
        self._request, self._context = request, context
        self._booking, self._client = booking, client
        self._items: Sequence[TakenItem] = ()  # named for the variant of `context`

    async def serve(self) -> None:
        """Serve the request to the end of its answer.

        Raises:
            RequestError: any failure; `client.has_begun` decides whether it must go into the stream.
        """
        asked = self._media.decisions.override.read(self._context.encode_header, self._context.caller)
        await self._wait_variant()
        await self._find_files()
        await self._take_items()
        while True:
            try:
                await self._serve_variant(asked)
            except RequestError as error:
                another = self._another_variant()
                if another is None or error.code not in LEFT_CODES:
                    raise
                log.warning(
                    "request goes to another version of its model: the first one has no instance left",
                    request_id=self._context.request_id,
                    code=error.code,
                    version=another.version,
                    **self._context.caller.fields,
                )
            else:
                return
            self._move_to(another)

    # ---- once for each request -------------------------------------------------------------------
    async def _wait_variant(self) -> None:
        """Choose the variant that the items are named for, once there is one.

        Raises:
            RequestError: there is none, and none comes back in time.
        """
        prior = self._context.prior
        if prior is not None and prior.record.namespace_digest is not None:  # settled by the stored response
            record = prior.record
            own = Variant(record.model_version, record.namespace_digest, frozenset({record.instance}))
            ranked = RankedVariants((own,), VariantReason.STORED_RESPONSE)
        else:
            ranked = await self._instances.wait_chosen(self._request.model, self._ranked)
        self._context = replace(self._context, variant=ranked.variants[0], variant_reason=ranked.reason)

    async def _find_files(self) -> None:
        """Look up uploaded files, and check the numbers of items before any is read."""
        request, files = self._request, self._media.files
        path = next((part.path for part in request.media if part.file_id is not None), None)
        if path is not None:
            if files is None:
                raise files_not_enabled(path)
            await files.find_files(request.media, self._context.caller)
        metrics = self._services.metrics
        metrics.items_per_request.labels(modality_of(request.media)).observe(len(request.media))
        self._check_counts()
        self._context.root.end_stage(Stage.QUEUE)

    def _check_counts(self) -> None:
        check_counts(self._request.media, self._instances.view.item_limits(self._context.namespace_digest))

    async def _take_items(self) -> None:
        """Decode or fetch the media, check, hash and name them."""
        request, context, booking = self._request, self._context, self._booking
        with span("gateway.media", attributes={"triptych.num_items": len(request.media)}):
            num_before = booking.num_bytes
            self._items = items = await self._media.intake.take_items(
                request,
                context.caller.flow,
                context.namespace_digest,
                context.first_token_deadline,
                lambda num: booking.resize(num_before + num),
            )
        if context.charge is not None:
            context.charge.on_media(sum(item.num_bytes for item in items if item.part.place))
        contents = {item.mm_hash: item.num_held_bytes for item in items}
        booking.resize(min(booking.num_bytes, request.num_prompt_bytes + sum(contents.values())))
        context.root.end_stage(Stage.MEDIA)

    # ---- once for each variant -------------------------------------------------------------------
    def _another_variant(self) -> Variant | None:
        """Return a variant with which the request may start again; None if there is none or too late."""
        context, ranked = self._context, self._ranked()
        is_too_late = self._client.has_begun or time.monotonic() >= context.first_token_deadline
        if is_too_late or context.prior is not None or context.variant is None or ranked is None:
            return None
        gone = {context.variant.key, *context.left}
        return next((each for each in ranked.variants if each.encodes and each.key not in gone), None)

    def _ranked(self) -> RankedVariants | None:
        """Return the variants that can take the request now, or None."""
        request = self._request
        ranked = self._instances.find_variants(
            request.model,
            self._context.demand,
            has_media=True,
            is_whole_only=demand_of(request, request.endpoint).is_whole_only,
        )
        return ranked if ranked.variants else None

    def _move_to(self, variant: Variant) -> None:
        """Name the items for another variant."""
        self._context.root.end_stage(Stage.GIVEN_UP)
        self._context = self._context.moved_to(variant)
        self._check_counts()
        digest = self._context.namespace_digest
        self._items = self._media.intake.rename_items(self._request, self._items, digest)

    async def _serve_variant(self, asked: DecisionMode | None) -> None:
        """Choose an instance and the process that encodes, and serve the request to the end of the answer."""
        request, context = self._request, self._context
        mm_hashes, places = {item.mm_hash for item in self._items}, self._media.transfers.places
        entry_places = await places.read(mm_hashes)
        items_at = places.stores_of(mm_hashes, entry_places)
        routing = chat_routing(request, context.session, context.namespace_digest, self._items, items_at)
        chosen = await self._wait_instance(routing)
        item_wait = self._new_wait(chosen)
        item_wait.on_entries_read(entry_places)
        async with self._open_wait(item_wait):
            decided = await self._decide(item_wait, chosen, asked)
            attempt = Attempt(routing, chosen, item_wait, decided)
            context.root.end_stage(Stage.QUEUE)
            reason = decided.decision.reason.value
            if not attempt.is_local:
                given_up = await self._serve_by_encoders(attempt)
                if given_up is None:
                    return
                reason = given_up.code
                context.root.end_stage(Stage.GIVEN_UP)
        # The wait is closed: what encoders still do is for others, and they need not wait for this request.
        if not await self._serve_whole(attempt, reason):
            attempt.item_wait = self._new_wait(chosen)
            async with self._open_wait(attempt.item_wait):
                given_up = await self._serve_by_encoders(attempt)
                if given_up is not None:
                    raise given_up

    async def _wait_instance(self, routing: RoutingRequest) -> InstanceRecord:
        """Return the instance that gets the request if encoders encode; of a pair, the one that prefills.

        Does not wait if another variant has an instance.

        Raises:
            RequestError: there is none, or none that does what the request asks for.
        """
        request, context, instances = self._request, self._context, self._instances
        if context.prior is not None:
            if context.prior.record.role not in SERVING_ROLES:
                message = "media cannot follow a response of an instance that only decodes"
                raise RequestError(400, "unsupported", message, request.media[0].path)
            return context.prior.record
        demand = demand_of(request, request.endpoint, context.namespace_digest)
        choice = RouteChoice(
            instances, demand, routing=routing, asked=context.demand, variant=context.variant
        )

        def choose() -> InstanceRecord | None:
            record = choice.pick_first()
            if record is None and self._ranked() is not None:
                raise instances.unknown_model(request.model)
            return record

        return await instances.wait_chosen(request.model, choose)

    def _names(self) -> Set[str] | None:
        """Return the names of instances that may get the request; None for all of its namespace."""
        context = self._context
        if context.prior is not None or context.variant is None:
            return None
        return self._instances.names_of(self._request.model, context.variant, context.demand)

    def _new_wait(self, chosen: InstanceRecord) -> ItemWait:
        context = self._context
        return ItemWait(
            context.request_id,
            chosen.instance,
            self._items,
            context.first_token_deadline,
            current_traceparent(),
            context.namespace_digest,
            chosen.max_model_len,
            fair_key=FairKey(encode_class_of(context, self._request.body), context.caller.flow),
            timings=context.root.on_items(
                (item.mm_hash, item.part.modality.value, item.num_bytes) for item in self._items
            ),
        )

    @asynccontextmanager
    async def _open_wait(self, item_wait: ItemWait) -> AsyncIterator[None]:
        """Open the wait; acks come first, since metadata may name the request from then on."""
        media = self._media
        async with media.final_acks.hold_acks(item_wait), media.orders.open_wait(item_wait):
            with media.transfers.hold(item_wait):
                yield

    async def _decide(
        self, item_wait: ItemWait, chosen: InstanceRecord, asked: DecisionMode | None
    ) -> DecidedRequest:
        """Decide which process encodes; a stored response that the request continues has settled that."""
        request, context, decisions = self._request, self._context, self._media.decisions
        prior = context.prior
        if prior is None:
            decided = await decisions.decide(request, item_wait, chosen, asked, self._names())
        else:
            has_encoder = self._instances.view.has_encoder(item_wait.namespace_digest)
            is_all_new = all(item.part.place for item in item_wait.items)
            is_local = prior.has_raw_media or (
                is_all_new and not has_encoder and prior.record.role in TOWER_ROLES
            )
            decided = decisions.settle(chosen, is_local=is_local)
        decision, root = decided.decision, context.root
        for name, value in decided.figures.items():
            root.set_attribute(name, value)
        root.on_decision(decision.way.value, decision.reason.value)
        if decision.prediction is not None:
            root.set_attribute("triptych.predicted_remote_s", decision.prediction.remote_cost_s)
            root.set_attribute("triptych.predicted_local_s", decision.prediction.local_cost_s)
        return decided

    # ---- by encoders -----------------------------------------------------------------------------
    async def _serve_by_encoders(self, attempt: Attempt) -> EncodeUnavailableError | None:
        """Serve by encoders within the open wait; return why an instance may encode instead.

        Raises:
            RequestError: no other way is left.
        """
        request, context, item_wait = self._request, self._context, attempt.item_wait
        settings, orders = self._services.settings, self._media.orders
        encode_wait = EncodeWait(
            self._instances.view,
            orders,
            item_wait,
            model=request.model,
            settings=settings,
            may_go_local=not attempt.is_local and context.prior is None,
            only=self._names(),
            may_go_elsewhere=lambda: self._another_variant() is not None,
            keep_open=self._client.keep_open if settings.encoders_on_demand and request.stream else None,
        )
        try:
            with span("gateway.encode_wait"):
                # Refused first: what could not be encoded in time, and a prompt whose text alone is too long.
                item_wait.raise_failure()
                await orders.admission.admit(item_wait, orders.items_of(item_wait))
                if request.endpoint.is_computed and orders.lacks_job(item_wait):
                    num_rows, limit_s = item_wait.num_rows, settings.tokenize_timeout_s
                    http, chosen = self._services.http, attempt.chosen
                    await check_prompt_length(http, chosen, request, num_rows, limit_s, context.losses.add)
                await encode_wait.wait_sizes()
            context.root.end_stage(Stage.SIZES)
            self._media.decisions.on_sizes(item_wait)
            await race(
                self._services.forwarder.forward(self._with_metadata(attempt), self._client),
                item_wait.wait_failure(),
                encode_wait.wait_given_up(),
                encode_wait.wait_left(),
            )
        except EncodeUnavailableError as error:
            is_too_late = self._client.has_begun or time.monotonic() >= item_wait.deadline
            if is_too_late or not encode_wait.has_local_encode:
                raise
            return error
        return None

    def _with_metadata(self, attempt: Attempt) -> UpstreamRequest:
        item_wait, chosen = attempt.item_wait, attempt.chosen
        check_fits(item_wait.items, item_wait.sizes, chosen)
        body = media_body(
            self._request,
            item_wait.items,
            item_wait.sizes,
            request_id=self._context.request_id,
            gateway=self._services.settings.instance,
            traceparent=item_wait.traceparent,
            remaining_ms=int((item_wait.deadline - time.monotonic()) * 1000),
            flow=item_wait.fair_key.flow,
        )
        remote = CostEstimate(CostKind.REMOTE) if attempt.is_local else attempt.decided.estimate
        upstream = self._upstream(attempt, body, remote)
        return replace(upstream, item_wait=item_wait, first_choice=chosen)

    def _upstream(self, attempt: Attempt, body: bytes, estimate: CostEstimate) -> UpstreamRequest:
        return UpstreamRequest(
            self._context,
            self._request,
            body,
            self._context.namespace_digest,
            estimate=estimate,
            items=self._items,
            endpoint=self._request.endpoint,
            routing=attempt.routing,
        )

    # ---- whole -----------------------------------------------------------------------------------
    async def _serve_whole(self, attempt: Attempt, reason: str) -> bool:
        """Serve by an instance with a vision tower; return False if encoders are to serve it instead.

        Raises:
            RequestError: it failed, and no other way is left.
        """
        context, booking, decided = self._context, self._booking, attempt.decided
        num_held, has_room = booking.num_bytes, False
        try:
            book_whole(self._items, booking, self._services.settings.max_body_bytes)
            has_room = True
            await self._forward_whole(attempt, reason)
        except RequestError as error:
            booking.resize(num_held)
            is_final = has_room and error.status_code != HTTPStatus.SERVICE_UNAVAILABLE
            is_final |= not attempt.is_local or context.prior is not None
            is_final |= self._client.has_begun or time.monotonic() >= context.first_token_deadline
            if is_final or not self._instances.view.has_encoder(context.namespace_digest):
                raise
            log.warning(
                "request goes to encoders: no instance has encoded it",
                request_id=context.request_id,
                code=error.code,
                **context.caller.fields,
            )
        else:
            return True
        if decided.estimate.place is not None:
            decided.estimate.place.leave()  # it may not have been sent at all
        context.root.on_local_encode_failed()
        context.root.end_stage(Stage.GIVEN_UP)
        return False

    async def _forward_whole(self, attempt: Attempt, reason: str) -> None:
        request, context, is_decided = self._request, self._context, attempt.is_local
        context.root.on_local_encode(reason)
        self._services.metrics.local_encodes.labels(reason).inc()
        if not is_decided:
            log.warning(
                "request is encoded by its prefill_decode",
                request_id=context.request_id,
                reason=reason,
                **context.caller.fields,
            )
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(self._services.threads, whole_body, request, self._items)
        context.root.end_stage(Stage.MEDIA)
        decided = attempt.decided
        upstream = self._upstream(
            attempt, body, decided.estimate if is_decided else CostEstimate(CostKind.LOCAL)
        )
        first = decided.instance if is_decided else None
        with span("gateway.local_encode", attributes={"triptych.reason": reason}):
            route = await self._services.forwarder.forward(
                replace(upstream, needs_tower=True, first_choice=first), self._client
            )
        if request.endpoint.is_computed and context.prior is None:
            self._media.decisions.on_encoded_here(request, attempt.item_wait, route.first)
