"""Flight requests: this gateway's requesters in each item's flight in Redis.

`EncodeOrders` owns this record and decides what is sent. No message comes when Redis, a gateway or
an encoder has lost something, so Redis is asked again now and then (`EncodeOrders.run_checks`).
"""

import asyncio
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from triptych_common.coordination import Backlog, Backlogs, FlightClaim, SingleFlight, merge_backlogs
from triptych_common.coordination.single_flight import ClaimMode
from triptych_common.domain.errors import BusUnavailableError, RequestError
from triptych_common.protocol.ids import JobId, MmHash
from triptych_common.protocol.messages import FailureKind, Requester, RequesterKey, requester_key
from triptych_common.telemetry import record_span
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.encode.admission.job_queue import READ_INTERVAL_S, JobQueue
from triptych_gateway.encode.encode_job import OrderLimits, encode_job, remaining_s
from triptych_gateway.encode.item_queue import ItemQueue
from triptych_gateway.encode.item_table import Item, ItemFailure
from triptych_gateway.encode.media_cache import MediaReadError, MediaSlot
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.locality.encode_stores import EncodeStores
from triptych_gateway.locality.job_place import JobPlace

log = get_logger(__name__)

EXPIRY_GRACE_S = 1.0  # beyond the last deadline: the encoder's own report comes first


@dataclass
class _Sent:
    """Requesters of one item that Redis may have."""

    keys: set[RequesterKey] = field(default_factory=set)
    until: float = 0.0  # monotonic seconds; Redis drops them by itself then


class FlightRequests:
    """Requesters of each item that were sent to Redis and may still be there."""

    def __init__(
        self, single_flight: SingleFlight, limits: OrderLimits, stores: EncodeStores, queue: ItemQueue
    ) -> None:
        self._single_flight = single_flight
        self._stores = stores
        self._queue = queue
        self.job_queue = JobQueue(limits.max_queued_jobs, limits.max_queue_age_s)
        self._limits = limits
        self._sent: dict[MmHash, _Sent] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def __iter__(self) -> Iterator[MmHash]:
        return iter(self._sent)

    def covers(self, mm_hash: MmHash, keys: set[RequesterKey]) -> bool:
        """Return whether all of `keys` were sent."""
        sent = self._sent.get(mm_hash)
        return sent is not None and keys <= sent.keys

    async def claim_item(
        self, item: Item, job_id: JobId, media_waits: list[MediaWait], requesters: tuple[Requester, ...]
    ) -> FlightClaim:
        """Add `requesters` to the item's flight, and claim it for `job_id` where no gateway has.

        Raises:
            BusUnavailableError: Redis may have recorded the requesters nevertheless.
        """
        mode: ClaimMode = "check" if item.is_claimed else "retry" if item.is_retry else "new"
        namespace_digest, ttl_s = media_waits[0].namespace_digest, remaining_s(media_waits) + EXPIRY_GRACE_S
        sent = self._sent.setdefault(item.mm_hash, _Sent())
        sent.keys.update(map(requester_key, requesters))
        sent.until = max(sent.until, time.monotonic() + ttl_s)
        claim = await self._single_flight.claim_flight(
            item.mm_hash,
            requesters,
            namespace_digest=namespace_digest,
            mode=mode,
            job_id=job_id,
            attempt=item.num_attempts,
            max_attempts=self._limits.attempts_after(item.retry_of),
            ttl_s=ttl_s,
            stores=self._stores.stores_of(namespace_digest),
            has_encoders=self._stores.has_encoders(namespace_digest),
            with_backlog=self.job_queue.needs_reading(namespace_digest, time.monotonic()),
        )
        if claim.backlogs is not None:
            self._note_backlogs(namespace_digest, claim.backlogs)
        return claim

    def _note_backlogs(self, namespace_digest: str, backlogs: Backlogs) -> Backlog:
        now, whole = time.monotonic(), merge_backlogs(backlogs)
        self._stores.note_backlogs(
            namespace_digest, backlogs, self._queue.num_by_store(namespace_digest), now
        )
        self.job_queue.note_backlog(namespace_digest, whole, now)
        return whole

    async def read_backlog(self, namespace_digest: str) -> Backlog:
        """Return the namespace's backlog over all its streams.

        Raises:
            BusUnavailableError
        """
        stores = self._stores.stores_of(namespace_digest)
        return self._note_backlogs(
            namespace_digest, await self._single_flight.read_backlogs(namespace_digest, stores)
        )

    async def run_room_reads(self) -> None:
        """Read the streams' room while orders wait for it, for ever."""
        while True:
            for namespace_digest in await self._queue.wait_held_back():
                try:
                    async with asyncio.timeout(self._limits.publish_timeout_s):
                        backlog = await self.read_backlog(namespace_digest)
                except (BusUnavailableError, TimeoutError) as error:
                    log.info("backlog of encode jobs not read", error=repr(error))
                    continue
                self._queue.note_stream(namespace_digest, backlog.num_jobs)
            await asyncio.sleep(READ_INTERVAL_S)

    async def withdraw_claim(self, mm_hash: MmHash, keys: set[RequesterKey]) -> None:
        """End a claim that is not needed any more: no other gateway may wait for this one to publish."""
        await self._single_flight.leave_flight(mm_hash, keys)
        self._sent[mm_hash].keys -= keys

    async def publish_job(
        self,
        item: Item,
        claim: FlightClaim,
        media: MediaSlot,
        media_waits: list[MediaWait],
        requesters: tuple[Requester, ...],
    ) -> JobPlace | None:
        """Publish the job of a claimed flight where its item is needed, or is made sooner.

        Returns:
            The place; None: Redis has lost the flight since it was claimed.

        Raises:
            MediaReadError: the media that were to travel with the job are gone.
            RequestError: 429, no encoder takes jobs.
            BusUnavailableError: Redis may have the job all the same.
        """
        began_ns, token, num_bytes, blob = time.time_ns(), media.token, media.num_bytes, None
        if self._limits.is_inline(num_bytes):
            try:
                blob = await media.fetch()
            except RequestError as error:
                raise MediaReadError(error) from error
        lane, limits = self._queue.lane_held(item.mm_hash), self._limits
        job = encode_job(item.mm_hash, claim, media_waits, requesters, lane, token, num_bytes, limits)
        digest, first = job.namespace_digest, media_waits[0]
        self.job_queue.admit_job(digest)
        place = self._stores.choose(
            digest,
            item.mm_hash,
            job.modality,
            job.image,
            num_rows=None if item.sizes is None else item.sizes.num_embeds,
            prefill_decode=first.prefill_decode,
            target=first.target,
            num_own=self._queue.num_by_store(digest),
            only_near=item.only_near,
            now=time.monotonic(),
        )
        entry_id = await self._single_flight.publish_job(
            job,
            store=place.store,
            spare_after_ms=place.spare_after_ms,
            traceparent=first.traceparent,
            remaining_ms=int(remaining_s(media_waits) * 1000),
            blob=blob,
        )
        if entry_id is None:
            return None
        for media_wait in media_waits:
            media_wait.note_placed(item.mm_hash, place)
        record_span(
            "gateway.publish_job",
            began_ns,
            time.time_ns(),
            traceparent=first.traceparent,
            attributes={
                "triptych.job_id": job.job_id,
                "triptych.encode_place": place.reason.value,
                "triptych.encode_store": place.store,
            },
        )
        return place

    def predict_transfers(self, media_wait: MediaWait, mm_hashes: Set[MmHash], target: str) -> list[float]:
        """Return the predicted seconds of each item's transfer from its encoders to `target`.

        An item for near encoders takes 0.
        """
        digest = media_wait.namespace_digest
        num_own = self._queue.num_by_store(digest).copy()
        found = []
        for item in media_wait.items:
            if item.mm_hash not in mm_hashes:
                continue
            place = self._stores.choose(
                digest,
                item.mm_hash,
                item.part.modality,
                None if item.image is None else item.image.properties,
                num_rows=None,
                prefill_decode=media_wait.prefill_decode,
                target=target,
                num_own=num_own,
                only_near=None,
                now=time.monotonic(),
            )
            num_own[place.store] += 1
            found.append(place.transfer_s)
        return found

    async def leave_all_but(self, mm_hash: MmHash, keys: set[RequesterKey]) -> bool:
        """End waits but those of `keys`; return True if no request waits and its job was dropped."""
        sent = self._sent.get(mm_hash)
        if sent is None:
            return False
        gone, is_dropped = sent.keys - keys, False
        if gone:
            try:
                async with asyncio.timeout(self._limits.publish_timeout_s):
                    is_dropped = await self._single_flight.leave_flight(mm_hash, gone)
            except (BusUnavailableError, TimeoutError) as error:
                log.warning(
                    "requesters could not be removed from a flight", mm_hash=mm_hash, error=repr(error)
                )
                if time.monotonic() >= sent.until:
                    del self._sent[mm_hash]
                return False
            sent.keys -= gone
        if not sent.keys:
            del self._sent[mm_hash]
        return is_dropped


def failed_order(error: Exception, job_id: JobId | None) -> ItemFailure:
    """Log why an order could not be placed, and return the failure."""
    if isinstance(error, RequestError):
        log.warning("encode job refused", job_id=job_id, code=error.code)
        return ItemFailure(None, error.message, error)
    if isinstance(error, BusUnavailableError | TimeoutError):
        log.warning("encode job not published", job_id=job_id, error=repr(error))
        return ItemFailure(None, "the control plane cannot be reached")
    log.error(
        "encode job not made", job_id=job_id, exc_info=error
    )  # a fault in this code: a retry may not help
    internal = RequestError(500, "internal_error", "the gateway failed to order an encode")
    return ItemFailure(None, internal.message, internal)


def failure_of(claim: FlightClaim) -> ItemFailure:
    """Return why the item of a refused claim will not be made."""
    if claim.failure is None:
        return ItemFailure(FailureKind.DEAD_LETTER, "the job vanished again and again")
    return ItemFailure(claim.failure.kind, claim.failure.detail)
