"""The encode job, made from the requests that wait for its item. Pure."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from triptych_common.coordination.single_flight import MAX_SENDS
from triptych_common.domain.fair_turns import LEVELS, turn_cost
from triptych_common.protocol.ids import JobId, MmHash
from triptych_common.protocol.messages import EncodeJob, FailureKind, Requester
from triptych_gateway.encode.item_queue import OrderPlace
from triptych_gateway.encode.media_cache import MEDIA_PATH
from triptych_gateway.encode.media_wait import MediaWait

MIN_REMAINING_S = 0.05


@dataclass(frozen=True, slots=True)
class OrderLimits:
    inline_media_bytes: int
    media_base_url: str
    max_attempts: int
    publish_timeout_s: float
    max_queued_jobs: int
    max_queue_age_s: float
    flight_check_s: float

    def is_inline(self, num_bytes: int) -> bool:
        """Whether so many bytes of media travel inside their job."""
        return num_bytes <= self.inline_media_bytes

    def attempts_after(self, kind: FailureKind | None) -> int:
        """How many jobs an item may cost, over all gateways, when the last one failed so (None: none did).

        Media that went away with their gateway are no fault of the item or its encoders: another gateway
        that has them may still publish.
        """
        return max(self.max_attempts, MAX_SENDS) if kind is FailureKind.MEDIA_GONE else self.max_attempts


def requesters_of(mm_hash: MmHash, media_waits: Sequence[MediaWait], gateway: str) -> tuple[Requester, ...]:
    """Every place of the item in the requests of `media_waits`."""
    return tuple(
        Requester(
            request_id=media_wait.request_id,
            item_index=item.part.item_index,
            gateway=gateway,
            prefill_decode=media_wait.prefill_decode,
        )
        for media_wait in media_waits
        for item in media_wait.items
        if item.mm_hash == mm_hash
    )


def remaining_s(media_waits: Sequence[MediaWait]) -> float:
    """Seconds until none of them waits any more; a little more than 0."""
    return max(max(media_wait.deadline for media_wait in media_waits) - time.monotonic(), MIN_REMAINING_S)


def place_of(mm_hash: MmHash, media_waits: Sequence[MediaWait], now: float) -> OrderPlace:
    """Where an order of the item stands that is made now: that of the first request that waits for it."""
    media_wait = first_of(media_waits)
    item = next(item for item in media_wait.items if item.mm_hash == mm_hash)
    cost = turn_cost(item.part.modality, None if item.image is None else item.image.properties)
    return OrderPlace(media_wait.namespace_digest, media_wait.lane, media_wait.deadline, now, cost)


def first_of(media_waits: Sequence[MediaWait]) -> MediaWait:
    """Of the requests that wait for an item, that whose place its order has."""
    return min(media_waits, key=lambda each: (LEVELS[each.lane.encode_class], each.deadline))


def encode_job(
    mm_hash: MmHash,
    job_id: JobId,
    attempt: int,
    media_waits: Sequence[MediaWait],
    requesters: tuple[Requester, ...],
    token: str,
    num_bytes: int,
    limits: OrderLimits,
) -> EncodeJob:
    """The job. `token`: of its media in the media cache; media of few bytes are to travel with the job."""
    lane = first_of(media_waits).lane
    first = next(item for item in media_waits[0].items if item.mm_hash == mm_hash)
    return EncodeJob(
        job_id=job_id,
        mm_hash=mm_hash,
        modality=first.part.modality,
        media_num_bytes=num_bytes,
        media_url=None if limits.is_inline(num_bytes) else f"{limits.media_base_url}{MEDIA_PATH}/{token}",
        image=None if first.image is None else first.image.properties,
        mm_processor_kwargs=dict(first.processor_options),
        media_io_kwargs=dict(first.media_io_options),
        piece_rows=first.piece_rows,
        requesters=requesters,
        attempt=attempt,
        namespace_digest=media_waits[0].namespace_digest,
        encode_class=lane.encode_class,
        flow=lane.flow,
    )
