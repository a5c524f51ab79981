"""Encode job, made from the requests that wait for its item. Pure."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from triptych_common.coordination import FlightClaim
from triptych_common.coordination.single_flight import MAX_SENDS
from triptych_common.domain.fair_turns import LEVELS, Lane, turn_cost
from triptych_common.protocol.ids import MmHash, RequestId
from triptych_common.protocol.messages import EncodeJob, FailureKind, Requester
from triptych_gateway.encode.item_queue import ItemQueue, OrderPlace
from triptych_gateway.encode.media_cache import MEDIA_PATH
from triptych_gateway.encode.media_wait import MediaWait

MIN_REMAINING_S = 0.05
RETRIED_KINDS = frozenset({FailureKind.ENCODER_ERROR, FailureKind.MEDIA_GONE, FailureKind.EXPIRED})


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
        """Return whether media of `num_bytes` travel inside their job."""
        return num_bytes <= self.inline_media_bytes

    def may_retry(self, kind: FailureKind | None, num_attempts: int) -> bool:
        """Return whether to retry after `num_attempts` attempts, the last failing with `kind`."""
        return kind in RETRIED_KINDS and num_attempts < self.attempts_after(kind)

    def attempts_after(self, kind: FailureKind | None) -> int:
        """Return the jobs that an item may cost, over all gateways, when the last failed with `kind`.

        Media that went away with their gateway are no fault of the item or its encoders: another gateway
        that has them may still publish.
        """
        return max(self.max_attempts, MAX_SENDS) if kind is FailureKind.MEDIA_GONE else self.max_attempts


def requesters_of(mm_hash: MmHash, media_waits: Sequence[MediaWait], gateway: str) -> tuple[Requester, ...]:
    """Return every place of the item in the requests of `media_waits`."""
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
    """Return the seconds until none of them waits any more; a little more than 0."""
    return max(max(media_wait.deadline for media_wait in media_waits) - time.monotonic(), MIN_REMAINING_S)


def place_of(
    mm_hash: MmHash, media_waits: Sequence[MediaWait], queue: ItemQueue, ordered_at: float
) -> tuple[RequestId, OrderPlace] | tuple[None, None]:
    """Return the best place in `queue` for an order of the item, among the requests that wait for it.

    That is the highest class; in it the lane in which it starts earliest; in it the nearest deadline. So an
    order of a flow with little to do does not wait for all earlier orders of another flow.
    """
    if not media_waits:
        return None, None
    firsts: dict[Lane, MediaWait] = {}  # of each lane: a later one's order would not start earlier
    for each in media_waits:
        if each.lane not in firsts or each.deadline < firsts[each.lane].deadline:
            firsts[each.lane] = each
    places = [(each, _place_in(mm_hash, each, ordered_at)) for each in firsts.values()]

    def turn(each: tuple[MediaWait, OrderPlace]) -> tuple[int, float, float]:
        media_wait, place = each
        start = 0.0 if len(places) == 1 else queue.start_of(mm_hash, media_wait.request_id, place)
        return LEVELS[place.lane.encode_class], start, place.deadline

    media_wait, place = min(places, key=turn)
    return media_wait.request_id, place


def _place_in(mm_hash: MmHash, media_wait: MediaWait, ordered_at: float) -> OrderPlace:
    item = next(item for item in media_wait.items if item.mm_hash == mm_hash)
    return OrderPlace(
        media_wait.namespace_digest,
        media_wait.lane,
        media_wait.deadline,
        max(ordered_at, media_wait.opened_at),
        turn_cost(item.part.modality, None if item.image is None else item.image.properties),
        item.part.item_index,
    )


def encode_job(
    mm_hash: MmHash,
    claim: FlightClaim,
    media_waits: Sequence[MediaWait],
    requesters: tuple[Requester, ...],
    lane: Lane | None,
    token: str,
    num_bytes: int,
    limits: OrderLimits,
) -> EncodeJob:
    """Return the job of a claimed flight.

    Args:
        lane: lane whose turn was taken for it, if any.
        token: token of its media in the media cache; small media travel with the job.
    """
    if lane is None:
        lane = min(media_waits, key=lambda each: (LEVELS[each.lane.encode_class], each.deadline)).lane
    first = next(item for item in media_waits[0].items if item.mm_hash == mm_hash)
    return EncodeJob(
        job_id=claim.job_id,
        mm_hash=mm_hash,
        modality=first.part.modality,
        media_num_bytes=num_bytes,
        media_url=None if limits.is_inline(num_bytes) else f"{limits.media_base_url}{MEDIA_PATH}/{token}",
        image=None if first.image is None else first.image.properties,
        mm_processor_kwargs=dict(first.processor_options),
        media_io_kwargs=dict(first.media_io_options),
        piece_rows=first.piece_rows,
        requesters=requesters,
        attempt=claim.attempt,
        namespace_digest=media_waits[0].namespace_digest,
        encode_class=lane.encode_class,
        flow=lane.flow,
    )
