"""Leases of other engines' KV caches. Pure.

The engine that prefilled keeps a KV cache until it was read, or until its lease is over. Then it reuses the
blocks, and a reader would not notice: reads are one-sided. So a read counts only if it ended before the lease
did. Heartbeats of a reader extend the lease; a late one may have found nothing to extend.
"""

from collections.abc import Iterable

MARGIN_S = 0.25  # between both engines' clocks, and for a heartbeat's way

KvName = tuple[str, str]
"""Engine id of the owner, and the owner's id of the request."""


class KvLeases:
    """Leases in seconds of the reader's clock; a heartbeat extends a lease by the owner's `extension_s`."""

    def __init__(self, extension_s: float) -> None:
        self._extension_s = extension_s
        self._heartbeats: dict[KvName, list[float]] = {}

    def on_heartbeats(self, names: Iterable[KvName], now: float) -> None:
        """Record heartbeats for `names`, which are all caches that wait or are being read."""
        known = self._heartbeats
        self._heartbeats = {name: [*known.get(name, ()), now] for name in names}

    def is_over(self, name: KvName, first_end: float | None, now: float) -> bool:
        """True if the blocks may be reused by now. `first_end` is None if the owner announced no lease."""
        return first_end is not None and now >= self.end_of(name, first_end)

    def end_of(self, name: KvName, first_end: float) -> float:
        """Time until which the cache is certainly kept; `first_end` is the lease's end without heartbeats."""
        end = first_end - MARGIN_S
        for sent_at in self._heartbeats.get(name, ()):
            if sent_at >= end:
                break
            end = max(end, sent_at + self._extension_s - MARGIN_S)
        return end
