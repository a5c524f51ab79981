"""Flights as this gateway sees them: Redis is told who waits here for which item, and who no longer does.

    touched --step--> claimed, joined or left, as the item table says at that moment

The item table is what is wanted; a step makes Redis agree with it, one at a time per item. So it does
not matter in which order requests come and go, nor what gets lost: the next step mends it. Steps are
taken when something changed, and once per `flight_check_s` for what is still unanswered: nothing wakes
anybody when a message, a gateway or Redis' memory is lost. Then the job is sent again, under its own id.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol

from triptych_common.coordination import ClaimResult, FlightClaim, SingleFlight
from triptych_common.coordination.single_flight import ClaimMode, RequesterKey, requester_key
from triptych_common.domain.errors import BusUnavailableError, RequestError
from triptych_common.protocol.ids import JobId, MmHash
from triptych_common.protocol.messages import EncoderCacheMetadata, FailureKind, Requester
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.encode.encode_job import OrderLimits, encode_job, remaining_s, requesters_of
from triptych_gateway.encode.item_queue import ItemQueue
from triptych_gateway.encode.item_table import Item, ItemFailure, ItemTable
from triptych_gateway.encode.job_queue import JobQueue
from triptych_gateway.encode.media_cache import MediaShelf
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.metrics import GatewayMetrics

log = get_logger(__name__)

EXPIRY_GRACE_S = 1.0  # beyond the last deadline: the encoder's own word comes first


class Listener(Protocol):
    """Who hears what a step came to."""

    def waiting(self, mm_hash: MmHash) -> list[MediaWait]:
        """Requests that need the item."""
        ...

    async def on_metadata(self, metadata: EncoderCacheMetadata) -> None: ...

    def fail(self, mm_hash: MmHash, job_id: JobId, failure: ItemFailure, *, is_final: bool = False) -> None:
        """The job came to nothing; `is_final`: and there shall be no other."""
        ...


@dataclass
class _Told:
    """Subscribers that Redis may know of."""

    namespace_digest: str  # of the item
    keys: set[RequesterKey] = field(default_factory=set)
    until: float = 0.0  # monotonic seconds; Redis forgets them by itself then


class Flights:
    """`run` must run, several at once; `run_checks` once."""

    def __init__(
        self,
        inflight: SingleFlight,
        table: ItemTable,
        shelf: MediaShelf,
        listener: Listener,
        gateway: str,
        limits: OrderLimits,
        metrics: GatewayMetrics,
    ) -> None:
        self._inflight = inflight
        self._queue = JobQueue(inflight, limits.max_queued_jobs, limits.max_queue_age_s)
        self._table = table
        self._shelf = shelf
        self._listener = listener
        self._gateway = gateway
        self._limits = limits
        self._metrics = metrics
        self._told: dict[MmHash, _Told] = {}
        self._touched = ItemQueue()  # bounded by the items in the table and in `_told`
        self._unchecked: set[MmHash] = set()
        self._round: set[MmHash] = set()  # what the last round of checks has not come to yet
        self._busy: set[MmHash] = set()
        self._again: set[MmHash] = set()  # touched while a step was under way

    def __len__(self) -> int:
        """Items that Redis may think we wait for."""
        return len(self._told)

    # ---- wake-ups --------------------------------------------------------------------------------
    def touch(self, mm_hash: MmHash, *, check: bool = False) -> None:
        """What is wanted of the item has changed; `check`: or what Redis knows of it may have."""
        if check:
            self._unchecked.add(mm_hash)
        item = self._table.get(mm_hash)
        self._touched.add(mm_hash, is_urgent=item is not None and item.in_flight and not item.is_claimed)

    def check_all(self) -> None:
        """Redis may have lost something: look at all that is unanswered."""
        self._round = {*self._told, *(item.mm_hash for item in self._table if item.in_flight)}
        for mm_hash in self._round:
            self.touch(mm_hash, check=True)

    async def run_checks(self) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(self._limits.flight_check_s)
            if not self._round:  # else Redis is slow or away: more checks would only stand in the way
                self.check_all()

    async def run(self) -> None:
        """Take steps, one after the other. Never returns."""
        while True:
            mm_hash = await self._touched.get()
            if mm_hash in self._busy:
                self._again.add(mm_hash)
                continue
            self._busy.add(mm_hash)
            try:
                await self._step(mm_hash)
                while mm_hash in self._again:
                    self._again.discard(mm_hash)
                    await self._step(mm_hash)
            except Exception:  # one bad item must not stop the others; the next check tries again
                log.exception("step of a flight failed", mm_hash=mm_hash)
            finally:
                self._busy.discard(mm_hash)
                self._round.discard(mm_hash)

    # ---- one step --------------------------------------------------------------------------------
    async def _step(self, mm_hash: MmHash) -> None:
        is_check = mm_hash in self._unchecked
        self._unchecked.discard(mm_hash)
        item, tickets = self._table.get(mm_hash), self._listener.waiting(mm_hash)
        wanted = requesters_of(mm_hash, tickets, self._gateway)
        keys = {requester_key(each) for each in wanted}
        if item is not None and item.in_flight and tickets:
            told = self._told.get(mm_hash)
            if is_check or not item.is_claimed or told is None or not keys <= told.keys:
                await self._ask(item, tickets, wanted)
        # Who has stopped waiting before it was sealed must not be kept a tensor for; who still waits for
        # the request's first token stays, also when the job has ended.
        await self._leave(mm_hash, keys)

    async def _ask(self, item: Item, tickets: list[MediaWait], wanted: tuple[Requester, ...]) -> None:
        """Claim, and publish where that is for us. A first order that cannot be placed fails at once."""
        job_id, is_first = item.job_id, not item.is_claimed
        failure: ItemFailure | None = None
        try:
            async with asyncio.timeout(min(self._limits.publish_timeout_s, remaining_s(tickets))):
                await self._claim(item, tickets, wanted)
        except (BusUnavailableError, TimeoutError) as error:
            log.warning("encode job not published", job_id=job_id, error=repr(error))
            failure = ItemFailure(None, "the control plane cannot be reached")
        except RequestError as error:
            log.warning("encode job refused", job_id=job_id, code=error.code)
            failure = ItemFailure(None, error.message, error)
        except Exception:  # a fault of ours: nobody shall wait for what the next check may not mend
            log.exception("encode job not made", job_id=job_id)
            internal = RequestError(500, "internal_error", "the gateway failed to order an encode")
            failure = ItemFailure(None, internal.message, internal)
        if failure is not None and is_first and item.job_id is not None:
            self._listener.fail(item.mm_hash, item.job_id, failure, is_final=True)

    async def _claim(self, item: Item, tickets: list[MediaWait], wanted: tuple[Requester, ...]) -> None:
        job_id, ttl_s = item.job_id, remaining_s(tickets) + EXPIRY_GRACE_S
        if job_id is None:
            return
        mode: ClaimMode = "check" if item.is_claimed else "retry" if item.is_retry else "new"
        namespace_digest = tickets[0].namespace_digest
        told = self._told.setdefault(item.mm_hash, _Told(namespace_digest))
        told.keys.update(map(requester_key, wanted))
        told.until = max(told.until, time.monotonic() + ttl_s)
        claim = await self._inflight.claim_flight(
            item.mm_hash,
            wanted,
            namespace_digest=namespace_digest,
            mode=mode,
            job_id=job_id,
            attempt=item.num_attempts,
            max_attempts=self._limits.attempts_after(item.retry_of),
            ttl_s=ttl_s,
        )
        if item.job_id != job_id or self._table.get(item.mm_hash) is not item:
            # It went on meanwhile, so it was touched: the next step sees to it.
            if claim.result is ClaimResult.OWNER:  # and nobody shall wait for us to publish
                await self._inflight.leave_flight(
                    item.mm_hash, map(requester_key, wanted), namespace_digest=namespace_digest
                )
                told.keys.difference_update(map(requester_key, wanted))
            return
        self._table.adopt(item, claim.job_id, claim.attempt)
        match claim.result:
            case ClaimResult.OWNER:
                self._count_order(claim, mode)
                await self._publish(item.mm_hash, claim, tickets, wanted)
            case ClaimResult.JOINED:
                if mode != "check":
                    self._metrics.items.labels("joined").inc()
                if claim.metadata is not None:
                    await self._listener.on_metadata(claim.metadata)
            case ClaimResult.FAILED | ClaimResult.EXHAUSTED:
                self._listener.fail(
                    item.mm_hash, claim.job_id, _why(claim), is_final=claim.result is ClaimResult.EXHAUSTED
                )

    def _count_order(self, claim: FlightClaim, mode: ClaimMode) -> None:
        if mode == "check":
            log.warning("encode job sent again: nothing was known of it", job_id=claim.job_id)
            self._metrics.jobs_sent_again.inc()
        else:
            self._metrics.items.labels("ordered").inc()

    async def _publish(
        self, mm_hash: MmHash, claim: FlightClaim, tickets: list[MediaWait], wanted: tuple[Requester, ...]
    ) -> None:
        shelved = self._shelf.get(mm_hash)
        if shelved is None:
            return  # everybody went away, so it was touched
        job, blob = encode_job(mm_hash, claim.job_id, claim.attempt, tickets, wanted, shelved, self._limits)
        await self._queue.admit(job.namespace_digest)
        entry_id = await self._inflight.publish_job(
            job,
            traceparent=tickets[0].traceparent,
            remaining_ms=int(remaining_s(tickets) * 1000),
            blob=blob,
        )
        if entry_id is None:  # Redis lost the flight since it was claimed
            self.touch(mm_hash, check=True)

    async def _leave(self, mm_hash: MmHash, wanted: set[RequesterKey]) -> None:
        told = self._told.get(mm_hash)
        if told is None:
            return
        gone = told.keys - wanted
        if gone:
            try:
                async with asyncio.timeout(self._limits.publish_timeout_s):
                    is_dropped = await self._inflight.leave_flight(
                        mm_hash, gone, namespace_digest=told.namespace_digest
                    )
            except (BusUnavailableError, TimeoutError) as error:
                log.warning("subscription not ended", mm_hash=mm_hash, error=repr(error))
                if time.monotonic() >= told.until:
                    del self._told[mm_hash]
                return
            told.keys -= gone
            if is_dropped:
                log.info("encode job dropped: nobody waits for it", mm_hash=mm_hash)
                self._metrics.jobs_dropped.inc()
        if not told.keys:
            del self._told[mm_hash]


def _why(claim: FlightClaim) -> ItemFailure:
    if claim.failure is None:
        return ItemFailure(FailureKind.DEAD_LETTER, "the job vanished again and again")
    return ItemFailure(claim.failure.kind, claim.failure.detail)
