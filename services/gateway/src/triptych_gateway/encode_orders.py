"""Encode orders: asks encoders for items, once each, and tells every waiting request what became of them.

Publishing belongs to tasks of its own, not to the request that was first: a client that goes away
must not take the job of the others with it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

from triptych_common.bus import AsyncBus
from triptych_common.domain.errors import BusUnavailableError, RequestError
from triptych_common.protocol.ids import JobId, MmHash, RequestId
from triptych_common.protocol.messages import (
    EncodeCompleted,
    EncodeFailed,
    EncodeJob,
    EncodeNeeded,
    EncoderCacheMetadata,
    FailureKind,
    Message,
    Requester,
)
from triptych_common.protocol.names import StreamNames
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.item_table import Item, ItemFailure, ItemState, ItemTable
from triptych_gateway.job_queue import JobQueue
from triptych_gateway.media_shelf import MEDIA_PATH, MediaShelf
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.sizes import ItemSizes, SizesCache
from triptych_gateway.tickets import Ticket

log = get_logger(__name__)

RETRIED_KINDS = frozenset({FailureKind.ENCODER_ERROR, FailureKind.MEDIA_GONE, FailureKind.EXPIRED})
_EXPIRY_GRACE_S = 1.0
_MIN_REMAINING_S = 0.05


@dataclass(frozen=True, slots=True)
class OrderLimits:
    inline_media_bytes: int
    media_base_url: str
    max_attempts: int
    publish_timeout_s: float
    max_queued_jobs: int


@dataclass(frozen=True, slots=True)
class _Order:
    mm_hash: MmHash
    job_id: JobId
    attempt: int


class EncodeOrders:
    """Owns the item table, the shelf and the tickets. `run_publisher` must run; `handle` gets the results."""

    def __init__(
        self,
        *,
        bus: AsyncBus,
        names: StreamNames,
        gateway: str,
        shelf: MediaShelf,
        sizes: SizesCache,
        limits: OrderLimits,
        metrics: GatewayMetrics,
    ) -> None:
        self._queue = JobQueue(bus, names.encode_jobs, limits.max_queued_jobs)
        self._gateway = gateway
        self._shelf = shelf
        self._sizes = sizes
        self._limits = limits
        self._metrics = metrics
        self.table = ItemTable()
        self._tickets: dict[RequestId, Ticket] = {}
        # Bounded by the items in flight: the table lets one job per item in.
        self._outbox: asyncio.Queue[_Order] = asyncio.Queue()

    # ---- a request's side ----
    @asynccontextmanager
    async def open(self, ticket: Ticket) -> AsyncIterator[None]:
        """Keep the media of `ticket` and its place until the block ends.

        On entry `ticket` has the sizes that are known; `order` must be called for the others.
        """
        self._tickets[ticket.request_id] = ticket
        try:
            for item in ticket.items:
                self._shelf.put(item.mm_hash, item.content, ticket.request_id)
                self.table.join(item.mm_hash, ticket.request_id)
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

    async def _recall(self, ticket: Ticket) -> None:
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

    def lacks_job(self, ticket: Ticket) -> bool:
        """Whether an item of `ticket` has no sizes, and nobody asked an encoder for them."""
        items = [self.table.get(mm_hash) for mm_hash in ticket.mm_hashes if mm_hash not in ticket.sizes]
        return any(item is not None and not item.in_flight for item in items)

    def awaits_job(self, ticket: Ticket) -> bool:
        """Whether a job is in flight for an item that `ticket` still needs."""
        items = [self.table.get(mm_hash) for mm_hash in ticket.mm_hashes if ticket.needs(mm_hash)]
        return any(item is not None and item.in_flight for item in items)

    def order(self, ticket: Ticket) -> None:
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

    def _order(self, item: Item) -> None:
        job_id = JobId(f"job-{uuid4().hex}")
        deadline = max((ticket.deadline for ticket in self._waiting(item.waiters)), default=0.0)
        if self.table.order(item.mm_hash, job_id, deadline + _EXPIRY_GRACE_S):
            self._metrics.items.labels("ordered").inc()
            self._outbox.put_nowait(_Order(item.mm_hash, job_id, item.num_attempts))

    def _waiting(self, request_ids: Iterable[RequestId]) -> list[Ticket]:
        return [self._tickets[request_id] for request_id in request_ids if request_id in self._tickets]

    # ---- towards the encoders ----
    async def run_publisher(self) -> None:
        """Publish orders, one after the other; run a few of these. Never returns."""
        while True:
            order = await self._outbox.get()
            item = self.table.get(order.mm_hash)
            shelved = self._shelf.get(order.mm_hash)
            tickets = self._waiting(item.waiters) if item is not None else []
            if shelved is None or not tickets:  # everybody went away before it was sent
                self._fail(order.mm_hash, order.job_id, ItemFailure(FailureKind.MEDIA_GONE, "nobody waits"))
                continue
            await self._publish(order, tickets, *shelved)

    async def _publish(self, order: _Order, tickets: list[Ticket], token: str, content: bytes) -> None:
        requesters = tuple(
            Requester(
                request_id=ticket.request_id,
                item_index=item.part.item_index,
                gateway=self._gateway,
                prefill_decode=ticket.prefill_decode,
            )
            for ticket in tickets
            for item in ticket.items
            if item.mm_hash == order.mm_hash
        )
        first = next(item for item in tickets[0].items if item.mm_hash == order.mm_hash)
        inline = len(content) <= self._limits.inline_media_bytes
        job = EncodeJob(
            job_id=order.job_id,
            mm_hash=order.mm_hash,
            modality=first.part.modality,
            media_num_bytes=len(content),
            media_url=None if inline else f"{self._limits.media_base_url}{MEDIA_PATH}/{token}",
            mm_processor_kwargs=dict(first.processor_options),
            media_io_kwargs=dict(first.media_io_options),
            requesters=requesters,
            attempt=order.attempt,
            namespace_digest=tickets[0].namespace_digest,
        )
        remaining_s = max(max(ticket.deadline for ticket in tickets) - time.monotonic(), _MIN_REMAINING_S)
        try:
            async with asyncio.timeout(min(self._limits.publish_timeout_s, remaining_s)):
                await self._queue.put(
                    job,
                    traceparent=tickets[0].traceparent,
                    remaining_ms=int(remaining_s * 1000),
                    blob=content if inline else None,
                )
        except (BusUnavailableError, TimeoutError) as error:
            log.warning("encode job not published", job_id=order.job_id, error=repr(error))
            self._fail(order.mm_hash, order.job_id, ItemFailure(None, "the control plane cannot be reached"))
        except RequestError as error:
            log.warning("encode job refused", job_id=order.job_id, code=error.code)
            self._fail(order.mm_hash, order.job_id, ItemFailure(None, error.message, error))

    # ---- from the encoders and prefill_decode ----
    async def handle(self, message: Message) -> None:
        """One message of `encode-results:{gateway}`. Idempotent; late and unknown ones are harmless."""
        if isinstance(message, EncoderCacheMetadata):
            await self._on_metadata(message)
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
            self._fail(
                MmHash(message.mm_hash), JobId(message.job_id), ItemFailure(message.kind, message.detail)
            )
        elif isinstance(message, EncodeNeeded):
            self._on_needed(message)
        else:
            log.warning("unexpected message among encode results", type=message.TYPE)

    async def _on_metadata(self, message: EncoderCacheMetadata) -> None:
        mm_hash, sizes = MmHash(message.mm_hash), ItemSizes.of(message)
        is_new = self._sizes.put_local(mm_hash, sizes)
        for ticket in self._waiting(self.table.size(mm_hash, sizes, sealed=message.sealed)):
            ticket.set_sizes(mm_hash, sizes)
        if is_new:
            await self._sizes.store(mm_hash, sizes)

    def _on_completed(self, message: EncodeCompleted) -> None:
        mm_hash = MmHash(message.mm_hash)
        waiters = self.table.seal(mm_hash)
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

    def _fail(self, mm_hash: MmHash, job_id: JobId, failure: ItemFailure) -> None:
        waiters = [t for t in self._waiting(self.table.fail(mm_hash, job_id, failure)) if t.needs(mm_hash)]
        item = self.table.get(mm_hash)
        if item is None:
            return
        in_time = [ticket for ticket in waiters if ticket.deadline > time.monotonic()]
        if failure.kind in RETRIED_KINDS and item.num_attempts < self._limits.max_attempts and in_time:
            self._metrics.retries.inc()
            self._order(item)
            return
        for ticket in waiters:
            ticket.fail(mm_hash, failure)

    def expire(self, now: float) -> None:
        """Give up jobs of which nothing was heard in time (seconds, monotonic). Call it now and then."""
        for mm_hash, job_id in self.table.take_expired(now):
            self._fail(mm_hash, job_id, ItemFailure(FailureKind.EXPIRED, "no encoder answered in time"))
