"""Until when a KV cache of another engine may be read. Pure.

The one that prefilled keeps it until it was read, or until its lease is over. Then it computes something else
into these blocks, and a reader would not notice: reads are one-sided. So a read counts only if it ended
before the lease did. Heartbeats of a reader lengthen the lease; one that was sent too late may have found
nothing to lengthen.
"""

from collections.abc import Iterable

MARGIN_S = 0.25  # between both engines' clocks, and for a heartbeat's way

KvName = tuple[str, str]
"""The owner's engine id, and its id of the request."""


class KvLeases:
    """Times are seconds of one clock, the reader's. `extension_s`: of a heartbeat, as the owner counts it."""

    def __init__(self, extension_s: float) -> None:
        self._extension_s = extension_s
        self._heartbeats: dict[KvName, list[float]] = {}

    def on_heartbeats(self, names: Iterable[KvName], now: float) -> None:
        """Sent for these, which are all that wait now, or are read."""
        known = self._heartbeats
        self._heartbeats = {name: [*known.get(name, ()), now] for name in names}

    def is_over(self, name: KvName, first_end: float | None, now: float) -> bool:
        """Whether what is read by now may be another's. `first_end` None: its owner says of no lease."""
        return first_end is not None and now >= self.end_of(name, first_end)

    def end_of(self, name: KvName, first_end: float) -> float:
        """Until when it is certainly kept. `first_end`: of its lease without any heartbeat."""
        end = first_end - MARGIN_S
        for sent_at in self._heartbeats.get(name, ()):
            if sent_at >= end:
                break
            end = max(end, sent_at + self._extension_s - MARGIN_S)
        return end
