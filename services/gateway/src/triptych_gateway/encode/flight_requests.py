"""Flight requests: this gateway's requesters in each item's flight in Redis, and the jobs that it publishes.

`EncodeOrders` owns this record and decides what is sent. No message comes when Redis, a gateway or
an encoder has lost something, so Redis is asked again now and then (`EncodeOrders.run_checks`).
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from triptych_common.coordination import (
    Backlog,
    Backlogs,
    FlightClaim,
    JobOffer,
    SingleFlight,
    merge_backlogs,
)
from triptych_common.coordination.single_flight import MAX_SENDS, ClaimMode
from triptych_common.domain.errors import BusUnavailableError, RequestError
from triptych_common.domain.fair_queue import LEVELS, FairKey, slot_cost
from triptych_common.protocol.ids import JobId, MmHash, RequestId
from triptych_common.protocol.messages import EncodeJob, FailureKind, Requester, RequesterKey, requester_key
from triptych_common.telemetry import record_span
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.encode.encode_admission import READ_INTERVAL_S, JobQueue
from triptych_gateway.encode.item_queue import ItemQueue, OrderPlace
from triptych_gateway.encode.item_table import Item, ItemFailure
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.encode.media_cache import MediaReadError, MediaSlot
from triptych_gateway.locality.encode_stores import EncodeStores, JobPlace
from triptych_gateway.settings import EncodeSettings

log = get_logger(__name__)

MIN_REMAINING_S = 0.05
RETRIED_KINDS = frozenset({FailureKind.ENCODER_ERROR, FailureKind.MEDIA_GONE, FailureKind.EXPIRED})
EXPIRY_GRACE_S = 1.0  # beyond the last deadline: the encoder's own report comes first


def may_retry(settings: EncodeSettings, kind: FailureKind | None, num_attempts: int) -> bool:
    """Return whether to retry after `num_attempts` attempts, the last failing with `kind`."""
    return kind in RETRIED_KINDS and num_attempts < _attempts_after(settings, kind)


def _attempts_after(settings: EncodeSettings, kind: FailureKind | None) -> int:
    """Return the jobs that an item may cost, over all gateways, when the last failed with `kind`.

    Media that went away with their gateway are no fault of the item or its encoders: another gateway
    that has them may still publish.
    """
    num_attempts = settings.max_encode_attempts
    return max(num_attempts, MAX_SENDS) if kind is FailureKind.MEDIA_GONE else num_attempts


def requesters_of(mm_hash: MmHash, item_waits: Sequence[ItemWait], gateway: str) -> tuple[Requester, ...]:
    return tuple(
        Requester(
            request_id=item_wait.request_id,
            item_index=item.part.item_index,
            gateway=gateway,
            prefill_decode=item_wait.prefill_decode,
        )
        for item_wait in item_waits
        for item in item_wait.items
        if item.mm_hash == mm_hash
    )


def remaining_s(item_waits: Sequence[ItemWait]) -> float:
    """Return the seconds until none of them waits any more; a little more than 0."""
    return max(max(item_wait.deadline for item_wait in item_waits) - time.monotonic(), MIN_REMAINING_S)


def place_of(
    mm_hash: MmHash, item_waits: Sequence[ItemWait], queue: ItemQueue, ordered_at: float
) -> tuple[RequestId, OrderPlace] | tuple[None, None]:
    """Return the best place in `queue` for an order of the item, among the requests that wait for it.

    That is the highest class; in it the fair key by which it starts earliest; of that the nearest deadline.
    So an order of a flow with little to do does not wait for all earlier orders of another flow.
    """
    if not item_waits:
        return None, None
    firsts: dict[FairKey, ItemWait] = {}  # of each fair key: a later one's order would not start earlier
    for each in item_waits:
        if each.fair_key not in firsts or each.deadline < firsts[each.fair_key].deadline:
            firsts[each.fair_key] = each
    places = [(each, _place_in(mm_hash, each, ordered_at)) for each in firsts.values()]

    def turn(each: tuple[ItemWait, OrderPlace]) -> tuple[int, float, float]:
        item_wait, place = each
        start = 0.0 if len(places) == 1 else queue.start_of(mm_hash, item_wait.request_id, place)
        return LEVELS[place.fair_key.encode_class], start, place.deadline

    item_wait, place = min(places, key=turn)
    return item_wait.request_id, place


def _place_in(mm_hash: MmHash, item_wait: ItemWait, ordered_at: float) -> OrderPlace:
    item = item_wait.item_of(mm_hash)
    return OrderPlace(
        item_wait.namespace_digest,
        item_wait.fair_key,
        item_wait.deadline,
        max(ordered_at, item_wait.opened_at),
        slot_cost(item.part.modality, item.image_properties),
        item.part.item_index,
    )


def encode_job(
    mm_hash: MmHash,
    job_id: JobId,
    attempt: int,
    item_waits: Sequence[ItemWait],
    requesters: tuple[Requester, ...],
    fair_key: FairKey | None,
    media: MediaSlot,
    *,
    is_inline: bool,
) -> EncodeJob:
    """Return the job of an item's flight.

    Args:
        fair_key: class and flow whose slot was taken for it, if any.
        is_inline: the media travel with the job; else encoders fetch them.
    """
    if fair_key is None:
        fair_key = min(
            item_waits, key=lambda each: (LEVELS[each.fair_key.encode_class], each.deadline)
        ).fair_key
    first = item_waits[0].item_of(mm_hash)
    return EncodeJob(
        job_id=job_id,
        mm_hash=mm_hash,
        modality=first.part.modality,
        media_num_bytes=media.num_bytes,
        media_url=None if is_inline else media.url,
        image=first.image_properties,
        mm_processor_kwargs=dict(first.processor_options),
        media_io_kwargs=dict(first.media_io_options),
        piece_rows=first.piece_rows,
        requesters=requesters,
        attempt=attempt,
        namespace_digest=item_waits[0].namespace_digest,
        encode_class=fair_key.encode_class,
        flow=fair_key.flow,
    )


@dataclass
class _Sent:
    """Requesters of one item that Redis may have."""

    namespace_digest: str
    keys: set[RequesterKey] = field(default_factory=set)
    until: float = 0.0  # monotonic seconds; Redis drops them by itself then


class FlightRequests:
    """Requesters of each item that were sent to Redis and may still be there."""

    def __init__(
        self, single_flight: SingleFlight, settings: EncodeSettings, stores: EncodeStores, queue: ItemQueue
    ) -> None:
        self._single_flight = single_flight
        self._stores = stores
        self._queue = queue
        self.job_queue = JobQueue(settings.max_queued_jobs, settings.max_queue_age_s)
        self._settings = settings
        self._sent: dict[MmHash, _Sent] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def __iter__(self) -> Iterator[MmHash]:
        return iter(self._sent)

    def covers(self, mm_hash: MmHash, keys: set[RequesterKey]) -> bool:
        sent = self._sent.get(mm_hash)
        return sent is not None and keys <= sent.keys

    async def claim_item(
        self,
        item: Item,
        job_id: JobId,
        media: MediaSlot | None,
        item_waits: list[ItemWait],
        requesters: tuple[Requester, ...],
    ) -> tuple[FlightClaim, JobPlace | None]:
        """Add `requesters` to the item's flight, and claim it for `job_id` where no gateway has.

        Returns:
            The claim; the place of its job if that was published with it.

        Raises:
            BusUnavailableError: Redis may have recorded the requesters nevertheless.
        """
        mode: ClaimMode = "check" if item.is_claimed else "retry" if item.retry_of is not None else "new"
        began_ns, made = time.time_ns(), None
        if media is not None and mode != "check":  # a check seldom finds the job gone
            with contextlib.suppress(MediaReadError, RequestError):  # its owner's alone
                made = await self._make_offer(item, job_id, item.num_attempts, media, item_waits, requesters)
        namespace_digest, ttl_s = item_waits[0].namespace_digest, remaining_s(item_waits) + EXPIRY_GRACE_S
        sent = self._sent.setdefault(item.mm_hash, _Sent(namespace_digest))
        sent.keys.update(map(requester_key, requesters))
        sent.until = max(sent.until, time.monotonic() + ttl_s)
        claim = await self._single_flight.claim_flight(
            item.mm_hash,
            requesters,
            namespace_digest=namespace_digest,
            mode=mode,
            job_id=job_id,
            attempt=item.num_attempts,
            max_attempts=_attempts_after(self._settings, item.retry_of),
            ttl_s=ttl_s,
            stores=self._stores.stores_of(namespace_digest),
            has_encoders=self._stores.has_encoders(namespace_digest),
            with_backlog=self.job_queue.needs_reading(namespace_digest, time.monotonic()),
            offer=None if made is None else made[0],
        )
        if claim.backlogs is not None:
            self._note_backlogs(namespace_digest, claim.backlogs)
        if made is None or not claim.entry_id:
            return claim, None
        self._on_published(*made, item_waits, began_ns)
        return claim, made[1]

    def _note_backlogs(self, namespace_digest: str, backlogs: Backlogs) -> Backlog:
        now, whole = time.monotonic(), merge_backlogs(backlogs)
        self._stores.note_backlogs(
            namespace_digest, backlogs, self._queue.window.num_by_store(namespace_digest), now
        )
        self.job_queue.note_backlog(namespace_digest, whole, now)
        return whole

    async def read_backlog(self, namespace_digest: str) -> Backlog:
        """Return the namespace's backlog over all its streams; raises BusUnavailableError."""
        stores = self._stores.stores_of(namespace_digest)
        return self._note_backlogs(
            namespace_digest, await self._single_flight.read_backlogs(namespace_digest, stores)
        )

    async def run_room_reads(self) -> None:
        """Read the streams' room while orders wait for it, for ever."""
        while True:
            for namespace_digest in await self._queue.wait_held_back():
                try:
                    async with asyncio.timeout(self._settings.publish_timeout_s):
                        backlog = await self.read_backlog(namespace_digest)
                except (BusUnavailableError, TimeoutError) as error:
                    log.info("backlog of encode jobs not read", error=repr(error))
                    continue
                self._queue.note_stream(namespace_digest, backlog.num_jobs)
            await asyncio.sleep(READ_INTERVAL_S)

    async def withdraw_claim(self, mm_hash: MmHash, keys: set[RequesterKey]) -> None:
        """End a claim that is not needed any more: no other gateway may wait for this one to publish."""
        sent = self._sent[mm_hash]
        await self._single_flight.leave_flight(mm_hash, keys, namespace_digest=sent.namespace_digest)
        sent.keys -= keys

    async def publish_job(
        self,
        item: Item,
        claim: FlightClaim,
        media: MediaSlot,
        item_waits: list[ItemWait],
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
        began_ns = time.time_ns()
        offer, place = await self._make_offer(
            item, claim.job_id, claim.attempt, media, item_waits, requesters
        )
        if await self._single_flight.publish_job(offer) is None:
            return None
        self._on_published(offer, place, item_waits, began_ns)
        return place

    async def _make_offer(
        self,
        item: Item,
        job_id: JobId,
        attempt: int,
        media: MediaSlot,
        item_waits: list[ItemWait],
        requesters: tuple[Requester, ...],
    ) -> tuple[JobOffer, JobPlace]:
        """Return the item's job, for the place where the item is needed, or is made sooner."""
        blob = None
        is_inline = media.num_bytes <= self._settings.inline_media_bytes
        if is_inline:
            try:
                blob = await media.fetch()
            except RequestError as error:
                raise MediaReadError(error) from error
        fair_key = self._queue.key_held(item.mm_hash)
        job = encode_job(
            item.mm_hash, job_id, attempt, item_waits, requesters, fair_key, media, is_inline=is_inline
        )
        digest, first = job.namespace_digest, item_waits[0]
        max_oldest_s = self.job_queue.admit_job(digest, self._stores.served_s(digest, time.monotonic()))
        place = self._stores.choose(
            digest,
            item.mm_hash,
            job.modality,
            job.image,
            num_rows=None if item.sizes is None else item.sizes.num_embeds,
            prefill_decode=first.prefill_decode,
            target=first.target,
            num_own=self._queue.window.num_by_store(digest),
            only_near=item.only_near,
            now=time.monotonic(),
        )
        offer = JobOffer(
            job,
            store=place.store,
            spare_after_ms=place.spare_after_ms,
            traceparent=first.traceparent,
            remaining_ms=int(remaining_s(item_waits) * 1000),
            blob=blob,
            max_oldest_s=max_oldest_s,
        )
        return offer, place

    def _on_published(
        self, offer: JobOffer, place: JobPlace, item_waits: list[ItemWait], began_ns: int
    ) -> None:
        job = offer.job
        for item_wait in item_waits:
            item_wait.on_placed(MmHash(job.mm_hash), place)
        record_span(
            "gateway.publish_job",
            began_ns,
            time.time_ns(),
            traceparent=offer.traceparent,
            attributes={
                "triptych.job_id": job.job_id,
                "triptych.encode_place": place.reason.value,
                "triptych.encode_store": place.store,
            },
        )

    def predict_transfers(self, item_wait: ItemWait, mm_hashes: Set[MmHash], target: str) -> list[float]:
        """Return the predicted seconds of each item's transfer from its encoders to `target`.

        An item for near encoders takes 0.
        """
        digest = item_wait.namespace_digest
        num_own = self._queue.window.num_by_store(digest).copy()
        found = []
        for item in item_wait.items:
            if item.mm_hash not in mm_hashes:
                continue
            place = self._stores.choose(
                digest,
                item.mm_hash,
                item.part.modality,
                item.image_properties,
                num_rows=None,
                prefill_decode=item_wait.prefill_decode,
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
                async with asyncio.timeout(self._settings.publish_timeout_s):
                    is_dropped = await self._single_flight.leave_flight(
                        mm_hash, gone, namespace_digest=sent.namespace_digest
                    )
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
