"""Eviction policy: which of the unpinned sealed entries goes first. Pure."""

from collections import OrderedDict
from typing import Protocol

from triptych_cache_store.entry_table import Entry


class EvictionPolicy(Protocol):
    """Knows exactly the entries that may be evicted now: READY, not pinned."""

    def add(self, entry: Entry) -> None:
        """`entry` became evictable; its `last_used_at` is current."""

    def discard(self, entry: Entry) -> None:
        """`entry` was pinned or evicted."""

    def next_victim(self) -> Entry | None:
        """Who should go next; None when nothing may be evicted. Does not remove it."""

    def __len__(self) -> int: ...


class RecencyPolicy:
    """Least recently used first. An entry counts as used when it is sealed, pinned and unpinned."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, Entry] = OrderedDict()  # reservation_id -> entry, oldest first

    def add(self, entry: Entry) -> None:
        self._entries[entry.reservation_id] = entry

    def discard(self, entry: Entry) -> None:
        self._entries.pop(entry.reservation_id, None)

    def next_victim(self) -> Entry | None:
        return next(iter(self._entries.values()), None)

    def __len__(self) -> int:
        return len(self._entries)
