"""LinkRates: seconds that each link needs for some bytes, learned from its transfers."""

import time

from cachetools import LRUCache

from triptych_common.protocol.transfers import TransferFailureKind
from triptych_gateway.decision.linear_cost import LinearCost

UNKNOWN_RATE = 1.25e6  # bytes a second, taken for a link without an estimate: 10 Mbit/s
AVOIDED_S = 10.0  # after a link has failed: what could not be reached may come back
MAX_LINKS = 4096

NOT_OF_THE_LINK = frozenset(
    {
        TransferFailureKind.ABSENT,
        TransferFailureKind.WRITER_LOST,
        TransferFailureKind.TARGET_FULL,
        TransferFailureKind.EXPIRED,
    }
)
"""Kinds of failures that are not the link's fault."""

Link = tuple[str, str]  # source, target


class LinkRates:
    """Rates of all links; `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._costs: LRUCache[Link, LinearCost] = LRUCache(MAX_LINKS)
        self._avoided_until: LRUCache[Link, float] = LRUCache(MAX_LINKS)

    def observe(self, link: Link, num_bytes: int, seconds: float, now: float) -> None:
        """Learn from a complete transfer; one of no bytes only shows that the link works."""
        self._avoided_until.pop(link, None)
        if num_bytes:
            cost = self._costs.get(link)
            if cost is None:
                cost = self._costs[link] = LinearCost()
            cost.observe(num_bytes, seconds, now)

    def seconds(self, link: Link, num_bytes: int, now: float) -> float:
        """Return the predicted seconds for `num_bytes`; a cautious guess without measurements."""
        cost = self._costs.get(link)
        line = None if cost is None else cost.line(now)
        return num_bytes / UNKNOWN_RATE if line is None else line.seconds(num_bytes)

    def measured_s(self, source: str, target: str, num_bytes: int) -> float | None:
        """Return `seconds` of a measured link, or None.

        A link that is avoided takes `AVOIDED_S` longer, also one without an estimate.
        """
        link, now = (source, target), time.monotonic()
        if self.is_avoided(link, now):
            return AVOIDED_S + self.seconds(link, num_bytes, now)
        return self.seconds(link, num_bytes, now) if self.is_measured(link, now) else None

    def is_measured(self, link: Link, now: float) -> bool:
        """Return whether the link has an estimate of its own."""
        cost = self._costs.get(link)
        return cost is not None and cost.line(now) is not None

    def avoid(self, link: Link, now: float) -> None:
        """Avoid a link that has failed: others come first for a while."""
        self._avoided_until[link] = now + AVOIDED_S

    def is_avoided(self, link: Link, now: float) -> bool:
        return self._avoided_until.get(link, float("-inf")) > now
