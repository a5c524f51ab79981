"""Eviction policy for unpinned sealed entries. Pure."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from triptych_cache_store.entries.entry_table import Entry


class EvictionPolicy:
    """Least recently used first; the loss is the cost to encode again times the chance that it is needed.

    The encoder's cost grows with the rows it makes. The chance falls with the time since the last use:
    as often seen for caches, about as one over it. An entry counts as used when it is sealed, pinned and
    unpinned.

    It knows exactly the entries that may be evicted now: READY, not pinned.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[int, Entry] = OrderedDict()  # reservation_id -> entry, oldest use first

    def add_evictable(self, entry: Entry) -> None:
        """Add an entry that became evictable; its `last_used_at` is current."""
        self._entries[entry.reservation_id] = entry

    def discard_evictable(self, entry: Entry) -> None:
        """Remove an entry that was pinned or evicted."""
        self._entries.pop(entry.reservation_id, None)

    def candidates(self, limit: int) -> Iterator[Entry]:
        """Up to `limit` entries in the order of eviction, valid until the next change."""
        return islice(self._entries.values(), limit)

    def loss(self, entry: Entry, now: float) -> float:
        """Expected cost of evicting `entry`; the unit is arbitrary, and losses add up over entries."""
        return entry.spec.shape[0] / (1.0 + now - entry.last_used_at)

    def __len__(self) -> int:
        return len(self._entries)
