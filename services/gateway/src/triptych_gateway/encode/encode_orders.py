"""Orders of encodes: start flights, handle encoders' messages, and reconcile with Redis.

The item table has the wanted state; a step makes Redis agree with it, one at a time per item. A lost change
is repaired by the next step. A step is due when something changed, and every `flight_check_s` for what is
unanswered: a job that was lost is sent again, under its own id. A client that goes away takes no step along.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from uuid import uuid4

from triptych_common.coordination import ClaimResult, FlightClaim, SingleFlight
from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import JobId, MmHash, RequestId
from triptych_common.protocol.messages import (
    EncodeCompleted,
    EncodeFailed,
    EncodeNeeded,
    EncoderCacheMetadata,
    FailureKind,
    Message,
    Requester,
    requester_key,
)
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.encode.encode_admission import EncodeAdmission
from triptych_gateway.encode.flight_requests import (
    FlightRequests,
    failed_order,
    failure_of,
    may_retry,
    place_of,
    remaining_s,
    requesters_of,
)
from triptych_gateway.encode.item_queue import ItemQueue
from triptych_gateway.encode.item_table import Item, ItemFailure, ItemState, ItemTable
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.encode.job_window import JobWindow
from triptych_gateway.encode.media_cache import MediaCache, MediaReadError
from triptych_gateway.encode.sizes import ItemSizes, SizesCache
from triptych_gateway.locality.encode_stores import EncodeStores, JobPlace
from triptych_gateway.locality.item_places import ItemPlaces
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.settings import EncodeSettings

log = get_logger(__name__)
LOGGED = {"job_id", "kind", "detail", "encoder"}  # of a failure


class EncodeOrders:
    """Owner of the item table, the media waits and the flight requests.

    `run_steps` must run, several at once; `run_checks` once. `on_encode_result` gets the results.
    """

    def __init__(
        self,
        *,
        single_flight: SingleFlight,
        gateway: str,
        media_cache: MediaCache,
        sizes: SizesCache,
        settings: EncodeSettings,
        window: JobWindow,
        stores: EncodeStores,
        metrics: GatewayMetrics,
        places: ItemPlaces | None = None,  # None: one store is all there is
    ) -> None:
        self._gateway, self._media_cache = gateway, media_cache
        self.sizes, self.places = sizes, places or ItemPlaces(lambda: False)
        self._settings, self._stores, self._metrics = settings, stores, metrics
        self._item_waits: dict[RequestId, ItemWait] = {}
        self.queue, self.table = ItemQueue(window), ItemTable()  # bounded by each other, and by flights
        metrics.encodes_in_flight.set_function(lambda: sum(item.in_flight for item in self.table))
        self.flight_requests = FlightRequests(single_flight, settings, stores, self.queue)
        self.admission = EncodeAdmission(self.flight_requests.job_queue, self.queue, stores)

    # ---- a request's side ------------------------------------------------------------------------
    @asynccontextmanager
    async def open_wait(self, item_wait: ItemWait) -> AsyncIterator[None]:
        """Keep the media of `item_wait` and its place until the block ends.

        On entry it has the sizes that are known; `order_missing` must be called for the others.
        """
        self._item_waits[item_wait.request_id] = item_wait
        try:
            for item in item_wait.items:
                self._media_cache.keep_media(item.mm_hash, item.content, item_wait.request_id)
                if self.table.join_item(item.mm_hash, item_wait.request_id).in_flight:
                    self._place_anew(item.mm_hash)
                    self._queue_step(item.mm_hash)
            await self._recall_sizes(item_wait)
            for known in self.items_of(item_wait):
                if known.sizes is not None:
                    self._metrics.items.labels("sizes_known").inc()
                    item_wait.on_sized(known.mm_hash, known.sizes)
            yield
        finally:
            del self._item_waits[item_wait.request_id]
            for mm_hash in item_wait.mm_hashes:
                self.table.leave_item(mm_hash, item_wait.request_id)
                self._place_anew(mm_hash)
                self._media_cache.release_media(mm_hash, item_wait.request_id)
                self._queue_step(mm_hash)

    async def _recall_sizes(self, item_wait: ItemWait) -> None:
        """Recall sizes of earlier encodes: from memory, then from the bus for all items at once."""
        unknown = {each.mm_hash for each in self.items_of(item_wait) if each.state is ItemState.UNKNOWN}
        found = await self.sizes.find_all(item_wait.mm_hashes, unknown, self._settings.publish_timeout_s)
        for mm_hash, sizes, source in found:
            self._metrics.cache_hits.labels(source.value).inc()
            self.table.recall_sizes(mm_hash, sizes)
            item_wait.on_known(mm_hash, source)

    def lacks_job(self, item_wait: ItemWait) -> bool:
        """Return whether an item of `item_wait` has neither sizes nor a job."""
        items = self.items_of(item_wait)
        return any(not each.in_flight for each in items if each.mm_hash not in item_wait.sizes)

    def awaits_job(self, item_wait: ItemWait) -> bool:
        """Return whether a job is in flight for an item that `item_wait` still needs."""
        return any(item.in_flight and item_wait.needs(item.mm_hash) for item in self.items_of(item_wait))

    def num_waiting(self, namespace_digest: str) -> int:
        waits = (each for each in self._item_waits.values() if each.namespace_digest == namespace_digest)
        return sum(self.lacks_job(each) or self.awaits_job(each) for each in waits)

    def num_without_items(self) -> Counter[str]:
        """Return the number of requests whose items are sized and not all there, by instance."""
        return Counter(
            each.prefill_decode
            for each in self._item_waits.values()
            if not self.lacks_job(each) and self.awaits_job(each)
        )

    def namespace_of(self, item: Item) -> str | None:
        """Return the namespace of the requests that wait for `item`, or None."""
        return next((wait.namespace_digest for wait in self._waits_of(item.request_ids)), None)

    def order_missing(self, item_wait: ItemWait) -> None:
        """Order the items of `item_wait` without sizes, in order. It gets them, or a failure."""
        for item in self.items_of(item_wait):
            if item.mm_hash in item_wait.sizes:
                continue
            if item.sizes is not None:  # came in the meantime
                item_wait.on_sized(item.mm_hash, item.sizes)
            elif item.in_flight:
                self._note_joined(item.mm_hash, [item_wait])
            else:
                self._order_item(item, is_of_request=True)

    def order_near(self, mm_hash: MmHash, store: str | None) -> None:
        """Order a waited-for item at the encoders of `store`, if it has any; None: anywhere."""
        if (item := self.table.get(mm_hash)) is not None:
            self._order_item(item, only_near=store)

    def order_all(self, item_wait: ItemWait) -> None:
        """Order every item of `item_wait`, also those whose sizes are known: their tensors may be gone."""
        for item in self.items_of(item_wait):
            self._order_item(item, is_of_request=True)

    def _order_item(
        self,
        item: Item,
        *,
        is_of_request: bool = False,
        retry_of: FailureKind | None = None,
        only_near: str | None = None,
    ) -> None:
        """Order an item; `is_of_request`: the jobs of the request are published in order."""
        job_id, waits, now = JobId(f"job-{uuid4().hex}"), self._waits_of(item.request_ids), time.monotonic()
        if self.table.order_item(item.mm_hash, job_id, retry_of=retry_of, only_near=only_near, now=now):
            self.admission.begin_item(item.mm_hash, waits)
            self._queue_step(item.mm_hash, is_of_request=is_of_request)
            for item_wait in waits:
                item_wait.on_ordered(item.mm_hash)

    def _end_job(self, mm_hash: MmHash) -> None:
        self.queue.end_job(mm_hash)
        self.admission.end_item(mm_hash)

    def _note_joined(self, mm_hash: MmHash, item_waits: Iterable[ItemWait]) -> None:
        self._metrics.items.labels("joined").inc()
        for item_wait in item_waits:
            item_wait.on_joined(mm_hash)

    def items_of(self, item_wait: ItemWait) -> list[Item]:
        return [item for each in item_wait.mm_hashes if (item := self.table.get(each)) is not None]

    def _waits_of(self, request_ids: Iterable[RequestId]) -> list[ItemWait]:
        """Return the waits in a fixed order, so that the same messages lead to the same ones."""
        return [self._item_waits[each] for each in sorted(request_ids) if each in self._item_waits]

    # ---- messages of encoders and prefill_decodes ------------------------------------------------
    async def on_encode_result(self, message: Message) -> None:
        """Handle one message of `encode-results:{gateway}`. Idempotent; late and unknown ones are ignored."""
        if isinstance(message, EncoderCacheMetadata):
            await self._on_metadata(message)
        elif isinstance(message, EncodeCompleted):
            self._on_completed(message)
        elif isinstance(message, EncodeFailed):
            log.warning("encode failed", **message.model_dump(include=LOGGED))
            self._on_failed(message)
        elif isinstance(message, EncodeNeeded):
            self._on_needed(message)
        else:
            log.warning("unexpected message among encode results", type=message.TYPE)

    async def _on_metadata(self, message: EncoderCacheMetadata, *, is_copy: bool = False) -> None:
        """Record the sizes, also from a job that was under way before a request here joined it."""
        mm_hash, sizes = MmHash(message.mm_hash), ItemSizes.of(message)
        is_changed = self.sizes.put_local(mm_hash, sizes)
        self.places.note_metadata(message, is_copy=is_copy)
        self._stores.rows.observe(message)
        ordered = self.table.get(mm_hash)
        if message.sealed:
            self._end_job(mm_hash)
            if ordered is not None and ordered.job_id == message.job_id:
                self._metrics.cache_hits.labels("store").inc()
        for item_wait in self._waits_of(self.table.set_sizes(mm_hash, sizes, sealed=message.sealed)):
            item_wait.on_sized(mm_hash, sizes)
            if message.sealed:
                item_wait.on_sealed(mm_hash)
        if is_changed:
            await self.sizes.store_shared(mm_hash, sizes)

    def _on_failed(self, message: EncodeFailed) -> None:
        mm_hash, job_id = MmHash(message.mm_hash), JobId(message.job_id)
        self._metrics.encode_failures.labels(message.kind.value).inc()
        item = self.table.get(mm_hash)
        if item is not None and item.in_flight and item.job_id != job_id:
            self._queue_step(mm_hash, check=True)  # late; or of our job, whose id Redis has not answered yet
            return
        self._fail_job(mm_hash, job_id, ItemFailure(message.kind, message.detail))

    def _on_completed(self, message: EncodeCompleted) -> None:
        mm_hash = MmHash(message.mm_hash)
        was_in_flight = (ordered := self.table.get(mm_hash)) is not None and ordered.in_flight
        if ordered is not None and ordered.job_id == message.job_id:
            self._metrics.encode_s.observe(time.monotonic() - ordered.ordered_at)
            if not message.encode_s:
                self._metrics.cache_hits.labels("store").inc()
        self.places.note_sealed(mm_hash, message.job_id)
        self.admission.on_completed(message, time.monotonic())
        request_ids = self.table.seal_item(mm_hash)
        self._end_job(mm_hash)
        self._queue_step(mm_hash)
        item = self.table.get(mm_hash)
        if item is not None and item.sizes is None and request_ids:
            if was_in_flight:  # else the requests are still looking for sizes, and order what they lack
                self._order_item(item)  # the bus lost its metadata: the store has it, so asking is cheap
            return
        for item_wait in self._waits_of(request_ids):
            item_wait.on_sealed(mm_hash)

    def _on_needed(self, message: EncodeNeeded) -> None:
        mm_hash, item_wait = MmHash(message.mm_hash), self._item_waits.get(RequestId(message.request_id))
        item = self.table.get(mm_hash)
        if item_wait is None or item is None or item_wait.request_id not in item.request_ids:
            log.info("encode needed: its request has ended", request_id=message.request_id)
            return
        item_wait.on_needed_again(mm_hash)
        if not item.in_flight:
            log.info("encode needed", request_id=message.request_id, mm_hash=mm_hash, reason=message.reason)
            self._order_item(item)
        else:
            self._queue_step(mm_hash, check=True)  # Redis may have lost the job

    def on_media_failed(self, mm_hash: MmHash, error: RequestError) -> None:
        """Fail an item whose bytes are gone: no other job for it can help."""
        item = self.table.get(mm_hash)
        if item is not None and item.job_id is not None:
            log.warning("media of a job cannot be read", job_id=item.job_id, code=error.code)
            self._fail_job(mm_hash, item.job_id, ItemFailure(None, error.message, error), is_final=True)

    def _fail_job(
        self, mm_hash: MmHash, job_id: JobId, failure: ItemFailure, *, is_final: bool = False
    ) -> None:
        """Handle a failed job: order another if that can help, unless `is_final`."""
        self._end_job(mm_hash)
        self._queue_step(mm_hash)
        waits = self._waits_of(self.table.fail_job(mm_hash, job_id, failure))
        item_waits = [each for each in waits if each.needs(mm_hash)]
        item = self.table.get(mm_hash)
        if item is None:
            return
        in_time = [each for each in item_waits if each.deadline > time.monotonic()]
        if in_time and not is_final and may_retry(self._settings, failure.kind, item.num_attempts):
            self._metrics.retries.inc()
            self._order_item(item, retry_of=failure.kind, only_near=item.only_near)
            return
        for item_wait in item_waits:
            item_wait.on_failed(mm_hash, failure)

    # ---- which items a step is due for -----------------------------------------------------------
    def _queue_step(self, mm_hash: MmHash, *, check: bool = False, is_of_request: bool = False) -> None:
        """Queue a step for a changed item; `check` if Redis may have changed too."""
        item = self.table.get(mm_hash)
        if item is None or not item.in_flight or item.is_claimed:
            self.queue.add_item(mm_hash, is_urgent=False, check=check)
            return
        name, place = place_of(mm_hash, self._waits_of(item.request_ids), self.queue, item.ordered_at)
        request = name if is_of_request else None
        self.queue.add_item(mm_hash, is_urgent=True, check=check, request=request, place=place)

    def _place_anew(self, mm_hash: MmHash) -> None:
        """Move a new order to its best place, since other requests wait for the item now."""
        held, item = self.queue.place_held(mm_hash), self.table.get(mm_hash)
        if held is None:
            return
        waits = [] if item is None else self._waits_of(item.request_ids)
        place = place_of(mm_hash, waits, self.queue, 0.0 if item is None else item.ordered_at)[1]
        if place != held[1] and self.queue.withdraw_item(mm_hash):
            self._queue_step(mm_hash, is_of_request=True)

    def check_all(self) -> None:
        """Check all unanswered jobs, since Redis may have lost some."""
        in_flight = (item.mm_hash for item in self.table if item.in_flight)
        unanswered = tuple(dict.fromkeys((*self.flight_requests, *in_flight)))
        self.queue.begin_round(unanswered)
        for mm_hash in unanswered:
            self._queue_step(mm_hash, check=True)

    async def run_checks(self) -> None:
        """Queue checks at intervals, for ever."""
        while True:
            await asyncio.sleep(self._settings.flight_check_s)
            if not self.queue.has_round:  # else more checks would only stand in the way
                self.check_all()

    async def run_steps(self) -> None:
        """Take steps, one after the other, for ever."""
        await self.queue.run_steps(self._step)

    # ---- one step --------------------------------------------------------------------------------
    async def _step(self, mm_hash: MmHash, *, is_check: bool) -> None:
        item = self.table.get(mm_hash)
        waits = [] if item is None else self._waits_of(item.request_ids)
        item_waits = [each for each in waits if each.needs(mm_hash)]
        requesters = requesters_of(mm_hash, item_waits, self._gateway)
        keys = {requester_key(each) for each in requesters}
        if item is None or not item.in_flight:
            self._end_job(mm_hash)
        if item is not None and item.in_flight and item_waits:
            is_known = item.is_claimed and self.flight_requests.covers(mm_hash, keys)
            if is_check or not is_known:
                await self._place_order(item, item_waits, requesters)
        # No tensor may be kept for a request that left before the seal; one that still waits for its first
        # token stays, also when the job has ended.
        if await self.flight_requests.leave_all_but(mm_hash, keys):
            log.info("encode job dropped: no request waits for it", mm_hash=mm_hash)
            self._metrics.jobs_dropped.inc()

    async def _place_order(
        self, item: Item, item_waits: list[ItemWait], requesters: tuple[Requester, ...]
    ) -> None:
        """Claim the flight, and publish if this gateway owns it. A first order without a place fails."""
        job_id, is_first = item.job_id, not item.is_claimed
        try:
            async with asyncio.timeout(min(self._settings.publish_timeout_s, remaining_s(item_waits))):
                await self._claim(item, item_waits, requesters)
        except Exception as error:
            failure = failed_order(error, job_id)
            if is_first and item.job_id is not None:
                self._fail_job(item.mm_hash, item.job_id, failure, is_final=True)

    async def _claim(self, item: Item, item_waits: list[ItemWait], requesters: tuple[Requester, ...]) -> None:
        mm_hash, job_id, was_claimed = item.mm_hash, item.job_id, item.is_claimed
        if job_id is None:
            return
        media = self._media_cache.media_of(mm_hash)
        claim, place = await self.flight_requests.claim_item(item, job_id, media, item_waits, requesters)
        if item.job_id != job_id or self.table.get(mm_hash) is not item:
            # It went on meanwhile, so it is queued: the next step sees to it.
            if claim.result is ClaimResult.OWNER and place is None:
                await self.flight_requests.withdraw_claim(mm_hash, set(map(requester_key, requesters)))
            return
        self.table.apply_claim(item, claim.job_id, claim.attempt)
        match claim.result:
            case ClaimResult.OWNER:
                if was_claimed:
                    log.warning("encode job sent again: it was lost", job_id=claim.job_id)
                    self._metrics.jobs_sent_again.inc()
                else:
                    self._metrics.items.labels("ordered").inc()
                if place is None:
                    place = await self._publish(claim, item, item_waits, requesters)
                if place is not None:
                    self.queue.window.confirm_job(mm_hash, place.store)
                    self._metrics.encode_places.labels(place.reason.value).inc()
            case ClaimResult.JOINED:
                if not was_claimed:
                    self._note_joined(mm_hash, item_waits)
                if claim.metadata is not None:
                    await self._on_metadata(claim.metadata, is_copy=True)
            case ClaimResult.FAILED | ClaimResult.EXHAUSTED:
                is_final = claim.result is ClaimResult.EXHAUSTED
                self._fail_job(mm_hash, claim.job_id, failure_of(claim), is_final=is_final)

    async def _publish(
        self, claim: FlightClaim, item: Item, item_waits: list[ItemWait], requesters: tuple[Requester, ...]
    ) -> JobPlace | None:
        media = self._media_cache.media_of(item.mm_hash)
        if media is None:
            return None  # all requests went away, so it is queued
        try:
            place = await self.flight_requests.publish_job(item, claim, media, item_waits, requesters)
        except MediaReadError as failure:
            self.on_media_failed(item.mm_hash, failure.error)
            return None
        if place is None:
            self._queue_step(item.mm_hash, check=True)
        return place
