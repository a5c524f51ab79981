"""EncodeAdmission: refuses a request with media at once (429) if they could not be encoded in time.

A request is refused as a whole, before any of its items is ordered. Items that are known, or that an encoder
is making already, cost nothing. A flow answers for its own orders alone (docs/design/fairness.md).

While the time of an encode is unknown, `NUM_PROBES` items for each encoder are admitted; others wait for
their results, for `PROBE_S` at most.
"""

import asyncio
import time
from collections.abc import Sequence

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncodeCompleted
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.encode.admission.encode_backlog import EncodeBacklog, EncodeWork, Wait
from triptych_gateway.encode.admission.job_queue import JobQueue, queue_full, queue_slow
from triptych_gateway.encode.admission.return_times import ReturnTimes
from triptych_gateway.encode.item_queue import ItemQueue
from triptych_gateway.encode.item_table import Item
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.locality.encode_stores import EncodeStores
from triptych_gateway.request.media import TakenItem

log = get_logger(__name__)

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


class EncodeAdmission:
    """Admission of one gateway; `now` is in monotonic seconds."""

    def __init__(self, job_queue: JobQueue, queue: ItemQueue, stores: EncodeStores) -> None:
        self._job_queue = job_queue
        self._queue = queue
        self._stores = stores
        self._returns = ReturnTimes()
        self._ended = asyncio.Event()  # the next end of an item
        self.backlog = EncodeBacklog()

    async def admit(self, media_wait: MediaWait, items: Sequence[Item]) -> None:
        """Admit those of `items` whose sizes are unknown and which no encoder makes.

        They belong to `media_wait` and count as ordered from now on.

        Raises:
            RequestError: 429, with the seconds after which there is room.
        """
        now = time.monotonic()
        until = now + min(PROBE_S, PROBE_SHARE * (media_wait.deadline - now))
        while (new := self._new_items(media_wait, items)) and self._needs_probes(media_wait, new):
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    await self._ended.wait()
            except TimeoutError:
                break
        if new:
            self._admit(media_wait, new, time.monotonic())

    def _new_items(self, media_wait: MediaWait, items: Sequence[Item]) -> list[TakenItem]:
        unsized = {each.mm_hash for each in items if not each.in_flight and each.sizes is None}
        new = {each.mm_hash: each for each in media_wait.items if each.mm_hash in unsized}
        return [each for each in new.values() if each.mm_hash not in self.backlog]

    def _needs_probes(self, media_wait: MediaWait, new: Sequence[TakenItem]) -> bool:
        """Return whether the time that encoders take for such items will be known soon."""
        digest, lane = media_wait.namespace_digest, media_wait.lane
        num_probes = NUM_PROBES * self._stores.num_encoders(digest)
        if not num_probes or self.backlog.num_items(digest, lane) < num_probes:
            return False
        return self._predict(media_wait, new, time.monotonic()) is None

    def _predict(self, media_wait: MediaWait, new: Sequence[TakenItem], now: float) -> Wait | None:
        digest, works = media_wait.namespace_digest, map(_work, new)
        return self.backlog.predict(digest, media_wait.lane, works, self._stores.num_encoders(digest), now)

    def _admit(self, media_wait: MediaWait, new: Sequence[TakenItem], now: float) -> None:
        digest, lane, first = media_wait.namespace_digest, media_wait.lane, new[0]
        wait, since = self._predict(media_wait, new, now), self._queue.oldest_since(digest, lane)
        num_held = self.backlog.num_by_flow(digest) - self._queue.num_jobs_by_flow(digest)
        oldest_s = 0.0 if since is None else now - since
        if wait is not None:  # in a queue that is as long as it may be the oldest order is that old
            oldest_s /= OLDEST_SLACK
        is_back = self._returns.is_due(digest, lane, first.mm_hash, now)
        excess_s = 0.0 if wait is None else self._excess_s(wait, media_wait.deadline - now, is_back=is_back)
        error: RequestError | None = None
        if self._job_queue.is_full(lane.flow, num_held, len(new)):
            error = queue_full(first.part.path)
        elif excess_s > 0 or self._job_queue.is_slow(digest, num_held, oldest_s, now):
            error = queue_slow(first.part.path)
        if error is None:
            self._returns.forget(digest, lane, first.mm_hash)
            for each in new:
                self.begin_item(each.mm_hash, (media_wait,))
            return
        if wait is not None:  # else nothing is known of when there is room
            error.retry_after_s = self._returns.refuse(
                digest, lane, first.mm_hash, excess_s or wait.own_s, wait.own_s, now
            )
        log.warning(
            "media refused: they could not be encoded in time",
            request_id=media_wait.request_id,
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

    def begin_item(self, mm_hash: MmHash, media_waits: Sequence[MediaWait]) -> None:
        """Begin an order of the item for `media_waits`. Idempotent."""
        for media_wait in media_waits[:1]:
            item = next(each for each in media_wait.items if each.mm_hash == mm_hash)
            self.backlog.begin_item(mm_hash, media_wait.namespace_digest, media_wait.lane, _work(item))

    def end_item(self, mm_hash: MmHash) -> None:
        """End the item: no encode of it is under way any more. Idempotent."""
        if self.backlog.end_item(mm_hash) is not None:
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
    return EncodeWork.of(item.part.modality, None if item.image is None else item.image.properties)
