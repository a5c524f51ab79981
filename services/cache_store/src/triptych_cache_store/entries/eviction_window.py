"""Eviction window: neighbouring entries to evict so that a large enough range becomes free. Pure.

Evicting the least recently used one by one frees ranges here and there; a large tensor then costs much
more than its size. Instead: start at each of the entries that should go first, grow the range to the
neighbour whose loss per block is smaller, left or right (free ranges join at once), until it is large
enough or a used range stops it. The start with the smallest loss in total wins.
"""

from dataclasses import dataclass, field

from triptych_cache_store.entries.block_pool import BlockPool
from triptych_cache_store.entries.entry_table import Entry
from triptych_cache_store.entries.eviction import EvictionPolicy

NUM_STARTS = 32  # measured: docs/design/cache_store.md


@dataclass(slots=True)
class EvictableMap:
    """Evictable entries by their start and end."""

    by_start: dict[int, Entry] = field(default_factory=dict)
    by_end: dict[int, Entry] = field(default_factory=dict)

    def add_evictable(self, entry: Entry) -> None:
        self.by_start[entry.blocks.start] = entry
        self.by_end[entry.blocks.end] = entry

    def discard_evictable(self, entry: Entry) -> None:
        if self.by_start.pop(entry.blocks.start, None) is not None:
            del self.by_end[entry.blocks.end]


def cheapest_victims(
    num_blocks: int, pool: BlockPool, evictable: EvictableMap, policy: EvictionPolicy, now: float
) -> list[Entry] | None:
    """Entries to evict for a free range of `num_blocks`; None if no range can be freed."""
    best: list[Entry] | None = None
    least = float("inf")
    for start in policy.candidates(NUM_STARTS):
        window = _Window(start, pool, evictable, policy, now)
        while window.num_blocks < num_blocks and window.loss < least and window.grow():
            pass
        if window.num_blocks >= num_blocks and window.loss < least:
            best, least = window.victims, window.loss
    return best


class _Window:
    """Range of neighbouring blocks, all free or evictable."""

    def __init__(
        self, first: Entry, pool: BlockPool, evictable: EvictableMap, policy: EvictionPolicy, now: float
    ) -> None:
        self._pool = pool
        self._evictable = evictable
        self._policy = policy
        self._now = now
        self._start, self._end = first.blocks.start, first.blocks.end
        self.victims: list[Entry] = []
        self.loss = 0.0
        self._take(first)

    @property
    def num_blocks(self) -> int:
        return self._end - self._start

    def grow(self) -> bool:
        """Extend by the neighbour with the smaller loss per block; False between used ranges."""
        left, right = self._evictable.by_end.get(self._start), self._evictable.by_start.get(self._end)
        if left is not None and (right is None or self._density(left) <= self._density(right)):
            self._take(left)
        elif right is not None:
            self._take(right)
        else:
            return False
        return True

    def _take(self, entry: Entry) -> None:
        self.victims.append(entry)
        self.loss += self._policy.loss(entry, self._now)
        self._start = min(self._start, entry.blocks.start)
        self._end = max(self._end, entry.blocks.end)
        self._start -= self._pool.num_free_before(self._start)
        self._end += self._pool.num_free_from(self._end)

    def _density(self, entry: Entry) -> float:
        return self._policy.loss(entry, self._now) / entry.blocks.num_blocks
