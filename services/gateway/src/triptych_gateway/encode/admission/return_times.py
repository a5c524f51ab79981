"""ReturnTimes: times at which refused requests may come back, one after the other. Pure.

Room for one of them is not room for all: each of a flow's refused requests gets a time of its own, later by
what the one before it takes. A request that comes back before its time gets the same one again.
"""

from typing import NamedTuple

from cachetools import LRUCache

from triptych_common.domain.fair_turns import Lane
from triptych_common.protocol.ids import MmHash

MAX_TIMES = 8192  # that are remembered
MAX_LANES = 1024
MAX_RETRY_AFTER_S = 600.0
EARLY_S = 0.5  # by which a request may be early


class _Place(NamedTuple):
    namespace_digest: str
    lane: Lane
    first: MmHash  # of the request's new items


class ReturnTimes:
    """Times of refused requests; `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._times: LRUCache[_Place, float] = LRUCache(MAX_TIMES)
        self._last: LRUCache[tuple[str, Lane], float] = LRUCache(MAX_LANES)  # of a lane: the next one's

    def is_due(self, namespace_digest: str, lane: Lane, first: MmHash, now: float) -> bool:
        """Return whether the request was refused before, and may come back by now."""
        at = self._times.get(_Place(namespace_digest, lane, first))
        return at is not None and now >= at - EARLY_S

    def refuse(
        self, namespace_digest: str, lane: Lane, first: MmHash, excess_s: float, own_s: float, now: float
    ) -> float:
        """Return the seconds until the request may come back.

        Args:
            excess_s: seconds until the queue has room for it, if no other comes.
            own_s: seconds of its own encodes.
        """
        place, soonest = _Place(namespace_digest, lane, first), now + excess_s
        at = self._times.get(place, float("-inf"))
        if at <= now:  # new, or its time has passed and there was no room all the same
            at = max(soonest, self._last.get((namespace_digest, lane), soonest))
            self._last[namespace_digest, lane] = at + own_s
        at = self._times[place] = min(max(at, soonest), now + MAX_RETRY_AFTER_S)
        return at - now

    def forget(self, namespace_digest: str, lane: Lane, first: MmHash) -> None:
        """Forget a request that was admitted."""
        self._times.pop(_Place(namespace_digest, lane, first), None)
