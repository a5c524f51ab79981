"""Encode orders: what requests here want of encoders, and what they are told of it.

The talk with Redis belongs to tasks of its own (`flights`), not to the request that was first: a client
that goes away must not take the job of the others with it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from uuid import uuid4

from triptych_common.coordination import SingleFlight
from triptych_common.protocol.ids import JobId, MmHash, RequestId
from triptych_common.protocol.messages import (
    EncodeCompleted,
    EncodeFailed,
    EncodeNeeded,
    EncoderCacheMetadata,
    FailureKind,
    Message,
)
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.encode.encode_job import OrderLimits
from triptych_gateway.encode.item_table import Item, ItemFailure, ItemState, ItemTable
from triptych_gateway.encode.media_cache import MediaShelf
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.encode.single_flight import Flights
from triptych_gateway.encode.sizes import ItemSizes, SizesCache
from triptych_gateway.metrics import GatewayMetrics

log = get_logger(__name__)

RETRIED_KINDS = frozenset({FailureKind.ENCODER_ERROR, FailureKind.MEDIA_GONE, FailureKind.EXPIRED})


class EncodeOrders:
    """Owns the item table, the shelf and the tickets. `flights` must run; `handle` gets the results."""

    def __init__(
        self,
        *,
        inflight: SingleFlight,
        gateway: str,
        shelf: MediaShelf,
        sizes: SizesCache,
        limits: OrderLimits,
        metrics: GatewayMetrics,
    ) -> None:
        self._shelf = shelf
        self._sizes = sizes
        self._limits = limits
        self._metrics = metrics
        self.table = ItemTable()
        self._tickets: dict[RequestId, MediaWait] = {}
        self.flights = Flights(inflight, self.table, shelf, self, gateway, limits, metrics)

    # ---- a request's side ----
    @asynccontextmanager
    async def open(self, ticket: MediaWait) -> AsyncIterator[None]:
        """Keep the media of `ticket` and its place until the block ends.

        On entry `ticket` has the sizes that are known; `order` must be called for the others.
        """
        self._tickets[ticket.request_id] = ticket
        try:
            for item in ticket.items:
                self._shelf.put(item.mm_hash, item.content, ticket.request_id)
                if self.table.join(item.mm_hash, ticket.request_id).in_flight:
                    self.flights.touch(item.mm_hash)
            await self._recall(ticket)
            for mm_hash in ticket.mm_hashes:
                known = self.table.get(mm_hash)
                if known is not None and known.sizes is not None:
                    self._metrics.items.labels("sizes_known").inc()
                    ticket.set_sizes(mm_hash, known.sizes)
            yield
        finally:
            del self._tickets[ticket.request_id]
            for mm_hash in ticket.mm_hashes:
                self.table.leave(mm_hash, ticket.request_id)
                self._shelf.release(mm_hash, ticket.request_id)
                self.flights.touch(mm_hash)

    async def _recall(self, ticket: MediaWait) -> None:
        """Sizes from before: memory, then the bus (for all items at once)."""
        unknown: list[MmHash] = []
        for mm_hash in ticket.mm_hashes:
            sizes = self._sizes.get_local(mm_hash)
            if sizes is not None:
                self.table.recall(mm_hash, sizes)
            elif (item := self.table.get(mm_hash)) is not None and item.state is ItemState.UNKNOWN:
                unknown.append(mm_hash)
        try:
            async with asyncio.timeout(self._limits.publish_timeout_s):
                found = await asyncio.gather(*map(self._sizes.fetch, unknown))
        except TimeoutError:
            return
        for mm_hash, sizes in zip(unknown, found, strict=True):
            if sizes is not None:
                self.table.recall(mm_hash, sizes)

    def lacks_job(self, ticket: MediaWait) -> bool:
        """Whether an item of `ticket` has no sizes, and nobody asked an encoder for them."""
        items = [self.table.get(mm_hash) for mm_hash in ticket.mm_hashes if mm_hash not in ticket.sizes]
        return any(item is not None and not item.in_flight for item in items)

    def awaits_job(self, ticket: MediaWait) -> bool:
        """Whether a job is in flight for an item that `ticket` still needs."""
        items = [self.table.get(mm_hash) for mm_hash in ticket.mm_hashes if ticket.needs(mm_hash)]
        return any(item is not None and item.in_flight for item in items)

    def order(self, ticket: MediaWait) -> None:
        """Order the items of `ticket` that have no sizes yet; it is told what becomes of them."""
        for mm_hash in ticket.mm_hashes:
            item = self.table.get(mm_hash)
            if item is None or mm_hash in ticket.sizes:
                continue
            if item.sizes is not None:  # came in the meantime
                ticket.set_sizes(mm_hash, item.sizes)
            elif item.in_flight:
                self._metrics.items.labels("joined").inc()
            else:
                self._order(item)

    def _order(self, item: Item, *, retry_of: FailureKind | None = None) -> None:
        if self.table.order(item.mm_hash, JobId(f"job-{uuid4().hex}"), retry_of=retry_of):
            self.flights.touch(item.mm_hash)

    def waiting(self, mm_hash: MmHash) -> list[MediaWait]:
        """Requests that need the item."""
        item = self.table.get(mm_hash)
        return [t for t in self._waiting(item.waiters) if t.needs(mm_hash)] if item is not None else []

    def _waiting(self, request_ids: Iterable[RequestId]) -> list[MediaWait]:
        return [self._tickets[request_id] for request_id in request_ids if request_id in self._tickets]

    # ---- from the encoders and prefill_decode ----
    async def handle(self, message: Message) -> None:
        """One message of `encode-results:{gateway}`. Idempotent; late and unknown ones are harmless."""
        if isinstance(message, EncoderCacheMetadata):
            await self.on_metadata(message)
        elif isinstance(message, EncodeCompleted):
            self._on_completed(message)
        elif isinstance(message, EncodeFailed):
            log.warning(
                "encode failed",
                job_id=message.job_id,
                kind=message.kind,
                detail=message.detail,
                encoder=message.encoder,
            )
            self._on_failed(message)
        elif isinstance(message, EncodeNeeded):
            self._on_needed(message)
        else:
            log.warning("unexpected message among encode results", type=message.TYPE)

    async def on_metadata(self, message: EncoderCacheMetadata) -> None:
        """The sizes are known; also of a job that was on its way before anybody here joined it."""
        mm_hash, sizes = MmHash(message.mm_hash), ItemSizes.of(message)
        is_new = self._sizes.put_local(mm_hash, sizes)
        for ticket in self._waiting(self.table.size(mm_hash, sizes, sealed=message.sealed)):
            ticket.set_sizes(mm_hash, sizes)
        if is_new:
            await self._sizes.store(mm_hash, sizes)

    def _on_failed(self, message: EncodeFailed) -> None:
        mm_hash, job_id = MmHash(message.mm_hash), JobId(message.job_id)
        item = self.table.get(mm_hash)
        if item is not None and item.in_flight and item.job_id != job_id:
            self.flights.touch(mm_hash, check=True)  # late; or ours, and we have not heard its id yet
            return
        self.fail(mm_hash, job_id, ItemFailure(message.kind, message.detail))

    def _on_completed(self, message: EncodeCompleted) -> None:
        mm_hash = MmHash(message.mm_hash)
        waiters = self.table.seal(mm_hash)
        self.flights.touch(mm_hash)
        item = self.table.get(mm_hash)
        if item is not None and item.sizes is None and waiters:
            # Its metadata never came (the bus lost it): the store has it, so asking again is cheap.
            self._order(item)

    def _on_needed(self, message: EncodeNeeded) -> None:
        mm_hash, ticket = MmHash(message.mm_hash), self._tickets.get(RequestId(message.request_id))
        item = self.table.get(mm_hash)
        if ticket is None or item is None or ticket.request_id not in item.waiters:
            log.info("encode needed by a request that has ended", request_id=message.request_id)
            return
        ticket.need_again(mm_hash)
        if not item.in_flight:
            log.info("encode needed", request_id=message.request_id, mm_hash=mm_hash, reason=message.reason)
            self._order(item)
        else:
            self.flights.touch(mm_hash, check=True)  # is it, really?

    def fail(self, mm_hash: MmHash, job_id: JobId, failure: ItemFailure, *, is_final: bool = False) -> None:
        """The job came to nothing. It is ordered once more where that can help, unless `is_final`."""
        self.flights.touch(mm_hash)
        waiters = [t for t in self._waiting(self.table.fail(mm_hash, job_id, failure)) if t.needs(mm_hash)]
        item = self.table.get(mm_hash)
        if item is None:
            return
        in_time = [ticket for ticket in waiters if ticket.deadline > time.monotonic()]
        is_useful = failure.kind in RETRIED_KINDS and not is_final
        if is_useful and item.num_attempts < self._limits.attempts_after(failure.kind) and in_time:
            self._metrics.retries.inc()
            self._order(item, retry_of=failure.kind)
            return
        for ticket in waiters:
            ticket.fail(mm_hash, failure)
