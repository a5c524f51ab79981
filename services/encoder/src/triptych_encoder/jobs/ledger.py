"""Ledger: which (request, item)s still wait for a sealed entry, so how long the encoder keeps its pin. Pure.

    made --sealed--> HELD --every requester acked, or the deadline passed--> released

The producer's pin bridges the time between the seal and the consumers' own pins.
"""

from dataclasses import dataclass, field

Key = tuple[str, int]  # (request id, item index)


@dataclass
class Entry:
    mm_hash: str
    waiting: set[Key]
    deadline: float  # monotonic seconds
    pin_id: int | None = None
    granted: set[Key] = field(default_factory=set)


class Ledger:
    """By mm_hash. Every method returns the pins that may end now."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, mm_hash: str, requesters: set[Key], deadline: float) -> None:
        """A job's item was announced to these requesters."""
        entry = self._entries.get(mm_hash)
        if entry is None:
            self._entries[mm_hash] = Entry(mm_hash, set(requesters), deadline)
        else:
            entry.waiting |= requesters
            entry.deadline = max(entry.deadline, deadline)

    def sealed(self, mm_hash: str, pin_id: int) -> list[int]:
        """The entry is sealed and pinned for us. A second pin of it is not needed."""
        entry = self._entries.get(mm_hash)
        if entry is None or entry.pin_id is not None:
            return [pin_id]
        entry.pin_id = pin_id
        return self._end_if_done(entry)

    def granted(self, mm_hash: str, key: Key) -> None:
        entry = self._entries.get(mm_hash)
        if entry is not None:
            entry.granted.add(key)

    def is_granted(self, mm_hash: str) -> bool:
        """Has any consumer kept space for it?"""
        entry = self._entries.get(mm_hash)
        return entry is not None and bool(entry.granted)

    def settled(self, mm_hash: str, key: Key) -> list[int]:
        """A requester said its last word (injected, skipped, failed), or declined. Idempotent."""
        entry = self._entries.get(mm_hash)
        if entry is None:
            return []
        entry.waiting.discard(key)
        entry.granted.discard(key)
        return self._end_if_done(entry)

    def dropped(self, mm_hash: str, requesters: set[Key]) -> list[int]:
        """A job failed: these will not ack. Others may still, for an earlier job that did not."""
        entry = self._entries.get(mm_hash)
        if entry is None:
            return []
        entry.waiting -= requesters
        entry.granted -= requesters
        return self._end_if_done(entry)

    def expire(self, now: float) -> list[int]:
        """Entries whose requesters never answered."""
        late = [entry for entry in self._entries.values() if entry.deadline <= now]
        for entry in late:
            del self._entries[entry.mm_hash]
        return [entry.pin_id for entry in late if entry.pin_id is not None]

    def next_deadline(self) -> float | None:
        return min((entry.deadline for entry in self._entries.values()), default=None)

    def _end_if_done(self, entry: Entry) -> list[int]:
        if entry.waiting:
            return []
        del self._entries[entry.mm_hash]  # without a pin too: a later job lists it anew
        return [] if entry.pin_id is None else [entry.pin_id]
