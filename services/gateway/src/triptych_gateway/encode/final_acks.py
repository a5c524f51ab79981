"""The gateway's own last word about an item, where prefill_decode will not say one.

An encoder keeps its pin of a tensor until every (request, item) that it was made for has had its `ItemAck`.
That is prefill_decode's to say, but the one that the item was announced to may never have seen the request:
the caller left before it was sent, it failed, or another instance answered. Acks are idempotent.
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
from triptych_gateway.encode.media_wait import MediaWait

log = get_logger(__name__)

MAX_UNSAID = 10_000  # a word that is not said costs memory in the store until the job's deadline


@dataclass(frozen=True, slots=True)
class _Word:
    encoder: str
    ack: ItemAck


class FinalAcks:
    """Hears every encoder's metadata; `run` must run."""

    def __init__(self, bus: AsyncBus, gateway: str) -> None:
        self._bus = bus
        self._gateway = gateway
        self._pending: dict[RequestId, list[_Word]] = {}  # of living requests
        self._outbox: asyncio.Queue[_Word] = asyncio.Queue(MAX_UNSAID)

    @asynccontextmanager
    async def of(self, ticket: MediaWait) -> AsyncIterator[None]:
        """The request lives until the block ends."""
        self._pending[ticket.request_id] = []
        try:
            yield
        finally:
            words = self._pending.pop(ticket.request_id)
            if ticket.answered_by != ticket.prefill_decode:
                for word in words:
                    self._say(word)

    def hear(self, message: EncoderCacheMetadata) -> None:
        """An encoder makes, or has made, an item for requests of ours; some may have ended."""
        for requester in message.requesters:
            if requester.gateway != self._gateway:
                continue
            word = _Word(message.encoder, _skipped(message, requester))
            living = self._pending.get(RequestId(requester.request_id))
            if living is None:
                self._say(word)
            else:
                living.append(word)

    async def run(self) -> None:
        """Never returns."""
        while True:
            word = await self._outbox.get()
            try:
                await self._bus.publish(self._bus.names.acks(word.encoder), word.ack)
            except BusUnavailableError as error:
                log.warning("last word not said", encoder=word.encoder, error=str(error))

    def _say(self, word: _Word) -> None:
        try:
            self._outbox.put_nowait(word)
        except asyncio.QueueFull:
            log.warning("last word dropped", encoder=word.encoder, job_id=word.ack.job_id)


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
