"""JobPlace: the store whose encoders get a job. Pure.

Near encoders, those that write to the store of the chosen language model, save the transfer. They get the
job while it is predicted to wait for them no longer than it waits elsewhere and travels from there. The
prediction can be wrong, so other encoders may take a job that has waited for as long as its transfer would
take: it has then cost no more than twice the better choice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

LEAST_SPARE_S = 0.05  # least time for which a job is left to the encoders it is published for
MOST_SPARE_S = 10.0  # most time: other encoders cannot take jobs that wait behind it on the stream


class PlaceReason(StrEnum):
    """Reasons of the choice of a store's encoders."""

    NEAR = "near"  # they keep up
    LESS_BUSY = "less_busy"  # they are done sooner, with the transfer
    ONLY_PLACE = "only_place"  # no other store has encoders of the namespace
    NEAR_FAILED = "near_failed"  # asked for: the item could not be brought from another store
    ANYWHERE = "anywhere"  # no encoder is near, or it is not known where the item is needed
    NO_ENCODER = "no_encoder"  # none is registered: it waits for one


@dataclass(frozen=True, slots=True)
class JobPlace:
    store: str
    reason: PlaceReason
    spare_after_ms: int  # encoders of other stores may take the job then
    transfer_s: float = 0.0  # predicted seconds of the item's transfer to where it is needed


def choose_place(
    waits_s: Mapping[str, float],
    target: str | None,
    transfer_s: Callable[[str], float],
    *,
    only_near: str | None = None,
) -> JobPlace:
    """Choose the place of a job whose item is needed at `target`.

    Args:
        waits_s: by store with encoders, seconds until a job that is published now is begun.
        target: None: not known.
        transfer_s: the seconds that the item takes from a store to `target`.
        only_near: the store whose encoders shall have it, if it has any; others only after `MOST_SPARE_S`.
    """

    def travel_s(store: str) -> float:
        return 0.0 if target in (None, store) else transfer_s(store)

    if only_near is not None and only_near in waits_s:
        return JobPlace(only_near, PlaceReason.NEAR_FAILED, _spare_ms(MOST_SPARE_S), travel_s(only_near))
    best = min(waits_s, key=lambda each: (waits_s[each] + travel_s(each), each != target, each))
    if len(waits_s) == 1:
        return JobPlace(best, PlaceReason.ONLY_PLACE, _spare_ms(0.0), travel_s(best))
    if target not in waits_s:
        return JobPlace(best, PlaceReason.ANYWHERE, _spare_ms(0.0), travel_s(best))
    if best != target:
        return JobPlace(best, PlaceReason.LESS_BUSY, _spare_ms(0.0), travel_s(best))
    return JobPlace(
        best, PlaceReason.NEAR, _spare_ms(min(transfer_s(each) for each in waits_s if each != target))
    )


def _spare_ms(seconds: float) -> int:
    return int(min(max(seconds, LEAST_SPARE_S), MOST_SPARE_S) * 1000)
