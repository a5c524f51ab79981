"""Cache of answers that may be used again, bounded in bytes. Each belongs to one tenant alone."""

from collections import OrderedDict
from dataclasses import dataclass, field

from triptych_gateway.fetch.freshness import Freshness

ENTRY_BYTES = 512  # about what an entry costs besides its content


@dataclass(frozen=True, slots=True)
class CachedResponse:
    content: bytes = field(repr=False)
    freshness: Freshness
    fresh_until: float  # the clock of the caller's choice

    @property
    def num_bytes(self) -> int:
        return len(self.content) + ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class CacheKey:
    tenant_salt: str
    url: str = field(repr=False)


class ResponseCache:
    """Cache that drops the least recently used answer. With `max_bytes` 0 nothing is kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[CacheKey, CachedResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: CacheKey) -> CachedResponse | None:
        """Return the answer kept for `key`, fresh or not."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def keep(self, key: CacheKey, content: bytes, freshness: Freshness, now: float) -> None:
        """Replace the answer of `key` if the new one may be kept; else drop the old one."""
        self.drop(key)
        entry = CachedResponse(content, freshness, now + freshness.fresh_s)
        if not freshness.is_worth_keeping or entry.num_bytes + len(key.url) > self._max_bytes:
            return
        self._entries[key] = entry
        self.num_bytes += entry.num_bytes + len(key.url)
        while self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))

    def drop(self, key: CacheKey) -> None:
        """Drop the answer of `key`, if there is one."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes + len(key.url)
