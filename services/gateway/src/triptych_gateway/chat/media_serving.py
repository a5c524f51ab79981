"""Requests with media: the media are encoded elsewhere, and metadata are forwarded in their place.

media taken -> decided --remote--> sizes known -> forwarded with metadata -> answered
                  | ^                  |                  |
                  | |                  `--- no encoder ---+--> forwarded whole
                  | `--no answer begun--.
                  `--local--------------+--> forwarded whole, to an instance with a vision tower -> answered

Each way is tried at most once.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import ClientSession

from triptych_common.domain.errors import RequestError
from triptych_common.domain.fair_turns import Lane
from triptych_common.protocol.messages import InstanceRecord
from triptych_common.telemetry import current_traceparent, get_logger, span
from triptych_gateway.access.request_limiter import Booking
from triptych_gateway.chat.dispatch import Arrival, Dispatch, encode_class_of
from triptych_gateway.chat.forward import Forwarder
from triptych_gateway.chat.media_variants import (
    LEFT_CODES,
    another_variant,
    digest_of,
    moved_to,
    names_of,
    wait_instance,
    wait_variant,
)
from triptych_gateway.chat.routing import chat_routing
from triptych_gateway.chat.streaming import ClientStream
from triptych_gateway.chat.upstream_body import book_whole, check_fits, media_body, whole_body
from triptych_gateway.decision.courses import Course, CourseKind
from triptych_gateway.decision.decision_policy import DecisionMode
from triptych_gateway.decision.encode_decisions import DecidedRequest, EncodeDecisions
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.encode_wait import EncodeWait
from triptych_gateway.encode.final_acks import FinalAcks
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.errors import EncodeUnavailableError
from triptych_gateway.files.file_service import FileService, files_not_enabled
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.race import race
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.content_parts import modality_of
from triptych_gateway.request.item_counts import check_counts
from triptych_gateway.request.media import MediaIntake, TakenItem
from triptych_gateway.request.prompt_length import check_prompt_length
from triptych_gateway.routing.instances import Instances
from triptych_gateway.routing.router import TOWER_ROLES
from triptych_gateway.routing.scheduling.candidates import RoutingRequest
from triptych_gateway.routing.variants import Variant
from triptych_gateway.tracing.stages import Stage
from triptych_gateway.transfers.transfer_orders import TransferOrders

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MediaServing:
    """Server of one gateway's requests with media, and the parts they share."""

    gateway: str
    files: FileService | None  # None: none are kept
    intake: MediaIntake
    instances: Instances
    orders: EncodeOrders
    decisions: EncodeDecisions
    final_acks: FinalAcks
    transfers: TransferOrders
    forwarder: Forwarder
    http: ClientSession
    threads: Executor
    metrics: GatewayMetrics
    max_body_bytes: int
    tokenize_timeout_s: float
    encoder_grace_s: float
    local_encode_after_s: float

    async def serve(
        self, request: ChatRequest, arrival: Arrival, booking: Booking, client: ClientStream
    ) -> None:
        """Serve a request from its media's text to the end of the answer.

        Raises:
            RequestError: any failure; `client.has_begun` decides whether it must go into the stream.
        """
        asked = self.decisions.override.read(arrival.encode_header, arrival.caller)
        arrival = await wait_variant(self.instances, request, arrival)
        digest = digest_of(arrival)
        await self._find_files(request, arrival)
        self.metrics.items_per_request.labels(modality_of(request.media)).observe(len(request.media))
        check_counts(request.media, self.instances.view.item_limits(digest))
        arrival.root.end_stage(Stage.QUEUE)
        with span("gateway.media", attributes={"triptych.num_items": len(request.media)}):
            num_before = booking.num_bytes
            items = await self.intake.take_items(
                request, digest, arrival.first_token_deadline, lambda num: booking.resize(num_before + num)
            )
        if arrival.charge is not None:
            arrival.charge.on_media(sum(item.num_bytes for item in items if item.part.place))
        contents = {item.mm_hash: item.num_held_bytes for item in items}
        booking.resize(min(booking.num_bytes, request.num_prompt_bytes + sum(contents.values())))
        arrival.root.end_stage(Stage.MEDIA)
        while True:
            try:
                await self._serve_items(request, arrival, booking, client, items, asked)
            except RequestError as error:
                another = self._another_variant(request, arrival, client)
                if another is None or error.code not in LEFT_CODES:
                    raise
                log.warning(
                    "request goes to another version of its model: the first one has no instance left",
                    request_id=arrival.request_id,
                    code=error.code,
                    version=another.version,
                    **arrival.caller.fields,
                )
            else:
                return
            arrival.root.end_stage(Stage.GIVEN_UP)
            arrival = moved_to(another, arrival)
            check_counts(request.media, self.instances.view.item_limits(digest_of(arrival)))
            items = self.intake.rename_items(request, items, digest_of(arrival))

    def _another_variant(
        self, request: ChatRequest, arrival: Arrival, client: ClientStream
    ) -> Variant | None:
        """Return a variant with which the request may start again; None if there is none or too late."""
        is_too_late = client.has_begun or time.monotonic() >= arrival.first_token_deadline
        return None if is_too_late else another_variant(self.instances, request, arrival)

    async def _serve_items(
        self,
        request: ChatRequest,
        arrival: Arrival,
        booking: Booking,
        client: ClientStream,
        items: Sequence[TakenItem],
        asked: DecisionMode | None,
    ) -> None:
        """Serve named items in one namespace to the end of the answer."""
        digest = digest_of(arrival)
        mm_hashes, places = {item.mm_hash for item in items}, self.transfers.places
        entry_places = await places.read(mm_hashes)
        items_at = places.stores_of(mm_hashes, entry_places)
        routing = chat_routing(request, arrival.session, digest, items, items_at)
        chosen = await wait_instance(self.instances, request, arrival, routing)
        media_wait = _media_wait(request, arrival, items, digest, chosen)
        media_wait.entry_places.update(entry_places)
        async with self._open_wait(media_wait):
            decided = await self._decide(request, arrival, media_wait, chosen, asked)
            _show(decided, arrival)
            arrival.root.end_stage(Stage.QUEUE)
            reason = decided.decision.reason.value
            if not decided.decision.is_local:
                given_up = await self._serve_encoded(
                    request, arrival, media_wait, chosen, decided, client, routing
                )
                if given_up is None:
                    return
                reason = given_up.code
                arrival.root.end_stage(Stage.GIVEN_UP)
        # The wait is closed: what encoders still do is for others, and they need not wait for this request.
        num_held, has_room = booking.num_bytes, False
        try:
            book_whole(items, booking, self.max_body_bytes)
            has_room = True
            await self._serve_whole(request, arrival, media_wait, decided, reason, client, routing)
        except RequestError as error:
            booking.resize(num_held)
            is_final = has_room and error.status_code != HTTPStatus.SERVICE_UNAVAILABLE
            is_final |= not decided.decision.is_local or arrival.prior is not None
            is_final |= client.has_begun or time.monotonic() >= arrival.first_token_deadline
            if is_final or not self.instances.view.has_encoder(digest):
                raise
            log.warning(
                "request goes to encoders: no instance has encoded it",
                request_id=arrival.request_id,
                code=error.code,
                **arrival.caller.fields,
            )
        else:
            return
        if decided.course.place is not None:
            decided.course.place.leave()  # it may not have been sent at all
        arrival.root.on_local_encode_failed()
        arrival.root.end_stage(Stage.GIVEN_UP)
        media_wait = _media_wait(request, arrival, items, digest, chosen)
        async with self._open_wait(media_wait):
            given_up = await self._serve_encoded(
                request, arrival, media_wait, chosen, decided, client, routing
            )
            if given_up is not None:
                raise given_up

    @asynccontextmanager
    async def _open_wait(self, media_wait: MediaWait) -> AsyncIterator[None]:
        """Open the wait; acks come first, since metadata may name the request from then on."""
        async with self.final_acks.hold_acks(media_wait), self.orders.open_wait(media_wait):
            with self.transfers.hold(media_wait):
                yield

    async def _decide(
        self,
        request: ChatRequest,
        arrival: Arrival,
        media_wait: MediaWait,
        chosen: InstanceRecord,
        asked: DecisionMode | None,
    ) -> DecidedRequest:
        """Decide which process encodes `request`; a stored response that it continues has settled that."""
        prior = arrival.prior
        if prior is None:
            only = names_of(self.instances, request, arrival)
            return await self.decisions.decide(request, media_wait, chosen, asked, only)
        has_encoder = self.instances.view.has_encoder(media_wait.namespace_digest)
        is_all_new = all(item.part.place for item in media_wait.items)
        is_local = prior.has_raw_media or (
            is_all_new and not has_encoder and prior.record.role in TOWER_ROLES
        )
        return self.decisions.settle(chosen, is_local=is_local)

    async def _find_files(self, request: ChatRequest, arrival: Arrival) -> None:
        path = next((part.path for part in request.media if part.file_id is not None), None)
        if path is None:
            return
        if self.files is None:
            raise files_not_enabled(path)
        await self.files.find_files(request.media, arrival.caller)

    async def _serve_encoded(
        self,
        request: ChatRequest,
        arrival: Arrival,
        media_wait: MediaWait,
        chosen: InstanceRecord,
        decided: DecidedRequest,
        client: ClientStream,
        routing: RoutingRequest,
    ) -> EncodeUnavailableError | None:
        """Serve by encoders within the open `media_wait`; return why an instance may encode instead.

        Raises:
            RequestError: no other way is left.
        """
        encode_wait = EncodeWait(
            self.instances.view,
            self.orders,
            media_wait,
            model=request.model,
            encoder_grace_s=self.encoder_grace_s,
            local_encode_after_s=self.local_encode_after_s,
            may_go_local=not decided.decision.is_local and arrival.prior is None,
            only=names_of(self.instances, request, arrival),
            may_go_elsewhere=lambda: self._another_variant(request, arrival, client) is not None,
        )
        course = Course(CourseKind.REMOTE) if decided.decision.is_local else decided.course
        try:
            with span("gateway.encode_wait"):
                # Refused first: what could not be encoded in time, and a prompt whose text alone is too long.
                media_wait.raise_failure()
                await self.orders.admission.admit(media_wait, self.orders.items_of(media_wait))
                if request.endpoint.is_computed and self.orders.lacks_job(media_wait):
                    num_rows, limit_s = media_wait.num_rows, self.tokenize_timeout_s
                    await check_prompt_length(
                        self.http, chosen, request, num_rows, limit_s, arrival.losses.add
                    )
                await encode_wait.wait_sizes()
            arrival.root.end_stage(Stage.SIZES)
            self.decisions.on_sizes(media_wait)
            await race(
                self.forwarder.forward(
                    self._with_metadata(request, arrival, media_wait, chosen, course, routing), client
                ),
                media_wait.wait_failure(),
                encode_wait.wait_given_up(),
                encode_wait.wait_left(),
            )
        except EncodeUnavailableError as error:
            is_too_late = client.has_begun or time.monotonic() >= media_wait.deadline
            if is_too_late or not encode_wait.has_local_encode:
                raise
            return error
        return None

    async def _serve_whole(
        self,
        request: ChatRequest,
        arrival: Arrival,
        media_wait: MediaWait,
        decided: DecidedRequest,
        reason: str,
        client: ClientStream,
        routing: RoutingRequest,
    ) -> None:
        """Serve by an instance with a vision tower."""
        is_decided = decided.decision.is_local
        arrival.root.on_local_encode(reason)
        self.metrics.local_encodes.labels(reason).inc()
        if not is_decided:
            log.warning(
                "request is encoded by its prefill_decode",
                request_id=arrival.request_id,
                reason=reason,
                **arrival.caller.fields,
            )
        body = await asyncio.get_running_loop().run_in_executor(
            self.threads, whole_body, request, media_wait.items
        )
        arrival.root.end_stage(Stage.MEDIA)
        dispatch = Dispatch(
            arrival,
            request,
            body,
            media_wait.namespace_digest,
            needs_tower=True,
            first_choice=decided.instance if is_decided else None,
            course=decided.course if is_decided else Course(CourseKind.LOCAL),
            endpoint=request.endpoint,
            routing=routing,
        )
        with span("gateway.local_encode", attributes={"triptych.reason": reason}):
            route = await self.forwarder.forward(dispatch, client)
        if request.endpoint.is_computed and arrival.prior is None:
            self.decisions.on_encoded_here(request, media_wait, route.first)

    def _with_metadata(
        self,
        request: ChatRequest,
        arrival: Arrival,
        media_wait: MediaWait,
        chosen: InstanceRecord,
        course: Course,
        routing: RoutingRequest,
    ) -> Dispatch:
        check_fits(media_wait.items, media_wait.sizes, chosen)
        body = media_body(
            request,
            media_wait.items,
            media_wait.sizes,
            request_id=arrival.request_id,
            gateway=self.gateway,
            traceparent=media_wait.traceparent,
            remaining_ms=int((media_wait.deadline - time.monotonic()) * 1000),
            flow=media_wait.lane.flow,
        )
        return Dispatch(
            arrival,
            request,
            body,
            media_wait.namespace_digest,
            media_wait=media_wait,
            first_choice=chosen,
            course=course,
            endpoint=request.endpoint,
            routing=routing,
        )


def _media_wait(
    request: ChatRequest, arrival: Arrival, items: Sequence[TakenItem], digest: str, chosen: InstanceRecord
) -> MediaWait:
    return MediaWait(
        arrival.request_id,
        chosen.instance,
        items,
        arrival.first_token_deadline,
        current_traceparent(),
        digest,
        chosen.max_model_len,
        lane=Lane(encode_class_of(arrival, request.body), arrival.caller.flow),
        timings=arrival.root.on_items(
            (item.mm_hash, item.part.modality.value, item.num_bytes) for item in items
        ),
    )


def _show(decided: DecidedRequest, arrival: Arrival) -> None:
    decision = decided.decision
    for name, value in decided.figures.items():
        arrival.root.set_attribute(name, value)
    arrival.root.on_decision(decision.way.value, decision.reason.value)
    if decision.prediction is not None:
        arrival.root.set_attribute("triptych.predicted_remote_s", decision.prediction.remote_cost_s)
        arrival.root.set_attribute("triptych.predicted_local_s", decision.prediction.local_cost_s)
