"""A request with media: taken, encoded elsewhere, and forwarded with metadata in their place.

media taken -> sizes known -> forwarded with metadata -> answered
                    |                  |
                    `--- no encoder ---+--> forwarded whole, to an instance with a vision tower
"""

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import dataclass

import httpx

from triptych_common.protocol.messages import InstanceRecord
from triptych_common.telemetry import current_traceparent, get_logger, span
from triptych_gateway.access.request_limiter import Booking
from triptych_gateway.chat.forward import Arrival, Dispatch, Forwarder
from triptych_gateway.chat.streaming import ClientStream
from triptych_gateway.chat.upstream_body import check_fits, media_body, whole_body
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.encode_wait import EncodeWait
from triptych_gateway.encode.final_acks import FinalAcks
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.errors import EncodeUnavailableError
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.race import race
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.media import MediaIntake
from triptych_gateway.request.prompt_length import check_prompt_length
from triptych_gateway.routing.instances import Instances

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MediaServing:
    """One per gateway, with what these requests share."""

    gateway: str
    intake: MediaIntake
    instances: Instances
    orders: EncodeOrders
    final_acks: FinalAcks
    forwarder: Forwarder
    http: httpx.AsyncClient
    threads: Executor
    metrics: GatewayMetrics
    tokenize_timeout_s: float
    encoder_grace_s: float
    local_encode_after_s: float

    async def serve(
        self, request: ChatRequest, arrival: Arrival, booking: Booking, client: ClientStream
    ) -> None:
        """From the media's text to the end of the answer.

        Raises:
            RequestError: whatever went wrong; `client.has_begun` decides whether it must go into the stream.
        """
        digest = await self.instances.wait_namespace(request.model)
        with span("gateway.media", attributes={"triptych.num_items": len(request.media)}):
            items = await self.intake.take_items(request, digest)
        contents = {item.mm_hash: len(item.content) for item in items}
        booking.resize(min(booking.num_bytes, request.num_prompt_bytes + sum(contents.values())))
        chosen = await self.instances.wait_instance(request.model, digest)
        media_wait = MediaWait(
            arrival.request_id,
            chosen.instance,
            items,
            arrival.first_token_deadline,
            current_traceparent(),
            digest,
            chosen.max_model_len,
        )
        encode_wait = EncodeWait(
            self.instances.view,
            self.orders,
            media_wait,
            model=request.model,
            encoder_grace_s=self.encoder_grace_s,
            local_encode_after_s=self.local_encode_after_s,
        )
        # In this order: from the moment it is open, metadata may name the request, and it lives.
        async with self.final_acks.hold_acks(media_wait), self.orders.open_wait(media_wait):
            try:
                with span("gateway.encode_wait"):
                    await self._wait_sizes(request, media_wait, encode_wait, chosen)
                await race(
                    self.forwarder.forward(self._with_metadata(request, arrival, media_wait, chosen), client),
                    media_wait.wait_failure(),
                    encode_wait.wait_given_up(),
                )
            except EncodeUnavailableError as error:
                is_too_late = client.has_begun or time.monotonic() >= media_wait.deadline
                if is_too_late or not encode_wait.has_local_encode:
                    raise
                reason = error.code
            else:
                return
        # The wait is closed: what encoders still do is for others, and they need not wait for this request.
        arrival.root.set_attribute("triptych.local_encode", reason)
        self.metrics.local_encodes.labels(reason).inc()
        log.warning(
            "request is encoded by its prefill_decode",
            request_id=arrival.request_id,
            reason=reason,
            **arrival.caller.fields,
        )
        with span("gateway.local_encode", attributes={"triptych.reason": reason}):
            await self.forwarder.forward(await self._whole(request, arrival, media_wait), client)

    async def _wait_sizes(
        self, request: ChatRequest, media_wait: MediaWait, encode_wait: EncodeWait, chosen: InstanceRecord
    ) -> None:
        """A prompt that is too long is refused first, where that is known before the sizes."""
        media_wait.raise_failure()
        if self.orders.lacks_job(media_wait):
            await check_prompt_length(
                self.http, chosen, request, media_wait.num_rows, self.tokenize_timeout_s
            )
        await encode_wait.wait_sizes()

    def _with_metadata(
        self, request: ChatRequest, arrival: Arrival, media_wait: MediaWait, chosen: InstanceRecord
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
        )
        return Dispatch(
            arrival, request, body, media_wait.namespace_digest, media_wait=media_wait, first_choice=chosen
        )

    async def _whole(self, request: ChatRequest, arrival: Arrival, media_wait: MediaWait) -> Dispatch:
        body = await asyncio.get_running_loop().run_in_executor(
            self.threads, whole_body, request, media_wait.items
        )
        return Dispatch(arrival, request, body, media_wait.namespace_digest, needs_tower=True)
