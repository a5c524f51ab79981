"""Final acks by the gateway, where prefill_decode will not send one.

An encoder keeps its pin of a tensor until every (request, item) that it was made for has had its `ItemAck`.
prefill_decode sends it as a rule, but the one that the item was announced to may never have had the
request: the caller left before it was sent, it failed, or another instance answered. Acks are idempotent.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from triptych_common.bus import AsyncBus
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.ids import RequestId
from triptych_common.protocol.messages import EncoderCacheMetadata, ItemAck, Outcome, Requester
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.encode.item_wait import ItemWait

log = get_logger(__name__)

MAX_UNSENT = 10_000  # an ack that is not sent costs memory in the store until the job's deadline


@dataclass(frozen=True, slots=True)
class _FinalAck:
    encoder: str
    ack: ItemAck


class FinalAcks:
    """Final acks of one gateway, which gets every encoder's metadata; `run_sender` must run."""

    def __init__(self, bus: AsyncBus, gateway: str) -> None:
        self._bus = bus
        self._gateway = gateway
        self._pending: dict[RequestId, list[_FinalAck]] = {}  # of living requests
        self._outbox: asyncio.Queue[_FinalAck] = asyncio.Queue(MAX_UNSENT)

    @asynccontextmanager
    async def hold_acks(self, item_wait: ItemWait) -> AsyncIterator[None]:
        """Hold the acks of a request until the block ends; then send those that prefill_decode does not."""
        self._pending[item_wait.request_id] = []
        try:
            yield
        finally:
            pending = self._pending.pop(item_wait.request_id)
            if item_wait.answered_by != item_wait.prefill_decode:
                for final_ack in pending:
                    self._queue_ack(final_ack)

    def on_metadata(self, message: EncoderCacheMetadata) -> None:
        """Record an item that an encoder makes for requests of this gateway, some of which may have ended."""
        for requester in message.requesters:
            if requester.gateway != self._gateway:
                continue
            final_ack = _FinalAck(message.encoder, _skipped(message, requester))
            pending = self._pending.get(RequestId(requester.request_id))
            if pending is None:
                self._queue_ack(final_ack)
            else:
                pending.append(final_ack)

    async def run_sender(self) -> None:
        """Send acks from the queue, for ever."""
        while True:
            final_ack = await self._outbox.get()
            try:
                await self._bus.publish(self._bus.names.acks(final_ack.encoder), final_ack.ack)
            except BusUnavailableError as error:
                log.warning("final ack not sent", encoder=final_ack.encoder, error=str(error))

    def _queue_ack(self, final_ack: _FinalAck) -> None:
        try:
            self._outbox.put_nowait(final_ack)
        except asyncio.QueueFull:
            log.warning("final ack dropped", encoder=final_ack.encoder, job_id=final_ack.ack.job_id)


def _skipped(message: EncoderCacheMetadata, requester: Requester) -> ItemAck:
    return ItemAck(
        request_id=requester.request_id,
        item_index=requester.item_index,
        job_id=message.job_id,
        mm_hash=message.mm_hash,
        prefill_decode=requester.prefill_decode,
        outcome=Outcome.SKIPPED,
        detail="the request ended elsewhere",
    )
