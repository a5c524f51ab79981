"""EncodeAdmission: refuses a request with media at once (429) if they could not be encoded in time.

`JobQueue`: the stream's backlog comes with the claim of a flight (`SingleFlight.claim_flight`), if requested,
and is read while orders wait at this gateway. A flow has to answer for its own orders that wait here: none is
refused because another flow asks for too much. The bound on the stream's jobs refuses none: `JobWindow` lets
orders wait. Only where no encoder takes any job, all flows are refused (docs/design/fairness.md).

A request is refused as a whole, before any of its items is ordered. Items that are known, or that an encoder
is making already, cost nothing.

While the time of an encode is unknown, `NUM_PROBES` items for each encoder are admitted; others wait for
their results, for `PROBE_S` at most.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cachetools import LRUCache

from triptych_common.coordination import Backlog
from triptych_common.domain.errors import RequestError
from triptych_common.domain.fair_queue import FairKey
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncodeCompleted
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.encode.encode_backlog import EncodeBacklog, EncodeWork, Wait
from triptych_gateway.encode.item_queue import ItemQueue
from triptych_gateway.encode.item_table import Item
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.locality.encode_stores import EncodeStores
from triptych_gateway.request.media import TakenItem

log = get_logger(__name__)

READ_INTERVAL_S = 0.1
READ_HOLDS_S = 1.0
MAX_NAMESPACES = 64  # that are remembered; each is served by engines of its own
MAX_TIMES = 8192  # that are remembered
MAX_KEYS = 1024
MAX_RETRY_AFTER_S = 600.0
EARLY_S = 0.5  # by which a request may be early
DEADLINE_SHARE = 0.75
"""Share of the time until a request's deadline that its encodes may take as predicted: its prompt comes
behind them, and predictions err."""
RETURN_SLACK = 1.25
"""Factor by which the queue may be longer for a refused request that comes back at its time."""
OLDEST_SLACK = 1.5
"""Factor by which the oldest order of a flow may be older than a new one, if the wait is predicted."""
NUM_PROBES = 8
PROBE_S = 10.0
PROBE_SHARE = 0.25  # of the time until the request's deadline


@dataclass
class _Read:
    """Jobs of a namespace, as last read from Redis."""

    oldest_s: float = 0.0
    at: float = float("-inf")  # monotonic seconds


class JobQueue:
    """Queue that refuses orders that would wait too long, by its length and the stream's oldest job.

    Each namespace has bounds of its own: its encoders take no others' jobs.
    """

    def __init__(self, max_jobs: int, max_age_s: float) -> None:
        self._max_jobs = max_jobs
        self.max_age_s = max_age_s
        self._reads: LRUCache[str, _Read] = LRUCache(MAX_NAMESPACES)

    def needs_reading(self, namespace_digest: str, now: float) -> bool:
        """Return whether the last reading of the namespace's jobs is too old for the next job."""
        return now - self._reads.get(namespace_digest, _Read()).at >= READ_INTERVAL_S

    def note_backlog(self, namespace_digest: str, backlog: Backlog, now: float) -> None:
        self._reads[namespace_digest] = _Read(backlog.oldest_s, now)

    def is_full(self, flow: str, num_held: Mapping[str, int], num_new: int = 1) -> bool:
        """Return whether too many orders would wait here, of which `flow` would have more than its part.

        Args:
            num_held: orders that wait, by flow.
            num_new: orders of `flow` that are to come.
        """
        num_total, num_flows = sum(num_held.values()) + num_new, len({*num_held, flow})
        return num_total > self._max_jobs and num_held.get(flow, 0) + num_new > self._max_jobs // num_flows

    def is_slow(
        self,
        namespace_digest: str,
        num_held: Mapping[str, int],
        oldest_s: float,
        now: float,
        served_s: float = math.inf,
    ) -> bool:
        """Return whether an order would wait too long, by the orders that wait.

        Args:
            oldest_s: how long the oldest order has waited that is of the same flow and class.
            served_s: how long the namespace has had encoders; a wait for the first one shows no long queue.
        """
        read = self._reads.get(namespace_digest, _Read())
        is_known = now - read.at < READ_HOLDS_S
        is_old = oldest_s >= self.max_age_s or bool(is_known and num_held and read.oldest_s >= self.max_age_s)
        return is_old and served_s >= self.max_age_s

    def admit_job(self, namespace_digest: str, served_s: float = math.inf) -> float | None:
        """Let a job of the namespace be published, of whatever flow; `served_s` is as in `is_slow`.

        Returns:
            Seconds for which the stream's oldest job may have waited by a newer reading; None: for ever.

        Raises:
            RequestError: 429, the stream has a job that no encoder took for too long.
        """
        oldest_s = self._reads.get(namespace_digest, _Read()).oldest_s
        if min(oldest_s, served_s) >= self.max_age_s:
            raise queue_slow()
        return self.max_age_s if served_s >= self.max_age_s else None


def queue_full(param: str | None = None) -> RequestError:
    message = "too many media wait for an encoder; try again after Retry-After seconds"
    return RequestError(429, "encode_queue_full", message, param)


def queue_slow(param: str | None = None) -> RequestError:
    message = "media wait too long for an encoder; try again after Retry-After seconds"
    return RequestError(429, "encode_queue_slow", message, param)


class _Place(NamedTuple):
    namespace_digest: str
    fair_key: FairKey
    first: MmHash  # of the request's new items


class ReturnTimes:
    """Times of refused requests; `now` is in monotonic seconds.

    Room for one of them is not room for all: each of a flow's refused requests gets a time of its own, later
    by what the one before it takes. A request that comes back before its time gets the same one again.
    """

    def __init__(self) -> None:
        self._times: LRUCache[_Place, float] = LRUCache(MAX_TIMES)
        self._last: LRUCache[tuple[str, FairKey], float] = LRUCache(MAX_KEYS)  # the next time of a fair key

    def is_due(self, namespace_digest: str, fair_key: FairKey, first: MmHash, now: float) -> bool:
        """Return whether the request was refused before, and may come back by now."""
        at = self._times.get(_Place(namespace_digest, fair_key, first))
        return at is not None and now >= at - EARLY_S

    def refuse(
        self,
        namespace_digest: str,
        fair_key: FairKey,
        first: MmHash,
        excess_s: float,
        own_s: float,
        now: float,
    ) -> float:
        """Return the seconds until the request may come back.

        Args:
            excess_s: seconds until the queue has room for it, if no other comes.
            own_s: seconds of its own encodes.
        """
        place, soonest = _Place(namespace_digest, fair_key, first), now + excess_s
        at = self._times.get(place, float("-inf"))
        if at <= now:  # new, or its time has passed and there was no room all the same
            at = max(soonest, self._last.get((namespace_digest, fair_key), soonest))
            self._last[namespace_digest, fair_key] = at + own_s
        at = self._times[place] = min(max(at, soonest), now + MAX_RETRY_AFTER_S)
        return at - now

    def forget(self, namespace_digest: str, fair_key: FairKey, first: MmHash) -> None:
        self._times.pop(_Place(namespace_digest, fair_key, first), None)


class EncodeAdmission:
    """Admission of one gateway; `now` is in monotonic seconds."""

    def __init__(self, job_queue: JobQueue, queue: ItemQueue, stores: EncodeStores) -> None:
        self._job_queue = job_queue
        self._queue = queue
        self._stores = stores
        self._returns = ReturnTimes()
        self._ended = asyncio.Event()  # the next end of an item
        self.backlog = EncodeBacklog()

    async def admit(self, item_wait: ItemWait, items: Sequence[Item]) -> None:
        """Admit those of `items` whose sizes are unknown and which no encoder makes.

        They belong to `item_wait` and count as ordered from now on.

        Raises:
            RequestError: 429, with the seconds after which there is room.
        """
        now = time.monotonic()
        until = now + min(PROBE_S, PROBE_SHARE * (item_wait.deadline - now))
        while (new := self._new_items(item_wait, items)) and self._needs_probes(item_wait, new):
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    await self._ended.wait()
            except TimeoutError:
                break
        if new:
            self._admit(item_wait, new, time.monotonic())

    def _new_items(self, item_wait: ItemWait, items: Sequence[Item]) -> list[TakenItem]:
        unsized = {each.mm_hash for each in items if not each.in_flight and each.sizes is None}
        new = {each.mm_hash: each for each in item_wait.items if each.mm_hash in unsized}
        return [each for each in new.values() if each.mm_hash not in self.backlog]

    def _needs_probes(self, item_wait: ItemWait, new: Sequence[TakenItem]) -> bool:
        """Return whether the time that encoders take for such items will be known soon."""
        digest, fair_key = item_wait.namespace_digest, item_wait.fair_key
        num_probes = NUM_PROBES * self._stores.num_encoders(digest)
        if not num_probes or self.backlog.num_items(digest, fair_key) < num_probes:
            return False
        return self._predict(item_wait, new, time.monotonic()) is None

    def _predict(self, item_wait: ItemWait, new: Sequence[TakenItem], now: float) -> Wait | None:
        digest, works = item_wait.namespace_digest, map(_work, new)
        return self.backlog.predict(digest, item_wait.fair_key, works, self._stores.num_encoders(digest), now)

    def _admit(self, item_wait: ItemWait, new: Sequence[TakenItem], now: float) -> None:
        digest, fair_key, first = item_wait.namespace_digest, item_wait.fair_key, new[0]
        wait, since = self._predict(item_wait, new, now), self._queue.oldest_since(digest, fair_key)
        num_held = self.backlog.num_by_flow(digest) - self._queue.window.num_by_flow(digest)
        oldest_s = 0.0 if since is None else now - since
        if wait is not None:  # in a queue that is as long as it may be the oldest order is that old
            oldest_s /= OLDEST_SLACK
        is_back = self._returns.is_due(digest, fair_key, first.mm_hash, now)
        excess_s = 0.0 if wait is None else self._excess_s(wait, item_wait.deadline - now, is_back=is_back)
        error: RequestError | None = None
        if self._job_queue.is_full(fair_key.flow, num_held, len(new)):
            error = queue_full(first.part.path)
        elif excess_s > 0 or self._job_queue.is_slow(
            digest, num_held, oldest_s, now, self._stores.served_s(digest, now)
        ):
            error = queue_slow(first.part.path)
        if error is None:
            self._returns.forget(digest, fair_key, first.mm_hash)
            for each in new:
                self.begin_item(each.mm_hash, (item_wait,))
            return
        if wait is not None:  # else nothing is known of when there is room
            error.retry_after_s = self._returns.refuse(
                digest, fair_key, first.mm_hash, excess_s or wait.own_s, wait.own_s, now
            )
        log.warning(
            "media refused: they could not be encoded in time",
            request_id=item_wait.request_id,
            code=error.code,
            predicted_s=None if wait is None else round(wait.total_s, 1),
            retry_after_s=error.retry_after_s,
        )
        raise error

    def _excess_s(self, wait: Wait, remaining_s: float, *, is_back: bool) -> float:
        """Return the seconds until the queue is short enough, or 0. An idle encoder refuses nothing."""
        slack = RETURN_SLACK if is_back else 1.0
        too_old_s = wait.ahead_s - slack * self._job_queue.max_age_s
        too_late_s = wait.total_s - min(slack * DEADLINE_SHARE, 1.0) * remaining_s
        return min(max(too_old_s, too_late_s, 0.0), wait.ahead_s)

    def begin_item(self, mm_hash: MmHash, item_waits: Sequence[ItemWait]) -> None:
        """Begin an order of the item for `item_waits`. Idempotent."""
        for item_wait in item_waits[:1]:
            item = item_wait.item_of(mm_hash)
            self.backlog.begin_item(mm_hash, item_wait.namespace_digest, item_wait.fair_key, _work(item))

    def end_item(self, mm_hash: MmHash) -> None:
        """End the item: no encode of it is under way any more. Idempotent."""
        if self.backlog.end_item(mm_hash):
            self._note_end()

    def on_completed(self, message: EncodeCompleted, now: float) -> None:
        """Record that an encoder has made an item; 0 seconds mean that it was there already."""
        mm_hash = MmHash(message.mm_hash)
        if message.encode_s > 0 and (digest := self.backlog.namespace_of(mm_hash)) is not None:
            num_encoders = self._stores.num_encoders(digest)
            self.backlog.complete_item(mm_hash, message.encode_s, num_encoders, now)
            self._note_end()

    def _note_end(self) -> None:
        self._ended.set()
        self._ended = asyncio.Event()


def _work(item: TakenItem) -> EncodeWork:
    return EncodeWork.of(item.part.modality, item.image_properties)
