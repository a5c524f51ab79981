"""Space: one memory's entries and blocks; combines table, pool, policy and journal, and evicts when needed.
Pure."""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from triptych_cache_store.entries.block_pool import BestFitPool, BlockRange
from triptych_cache_store.entries.entry_table import Entry, EntryState, EntryTable
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.store import REDIS

NUM_STARTS = 32  # measured: docs/design/cache_store.md


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
        self._entries.pop(entry.reservation_id, None)

    def candidates(self, limit: int) -> Iterator[Entry]:
        """Up to `limit` entries in the order of eviction, valid until the next change."""
        return islice(self._entries.values(), limit)

    def loss(self, entry: Entry, now: float) -> float:
        """Expected cost of evicting `entry`; the unit is arbitrary, and losses add up over entries."""
        return entry.spec.shape[0] / (1.0 + now - entry.last_used_at)

    def __len__(self) -> int:
        return len(self._entries)


class EntryJournal:
    """Empty journal, for memory that ends with the store and cannot be recovered."""

    def note_reserved(self, entry: Entry, writer_slot: int) -> None:
        pass

    def note_sealed(self, entry: Entry) -> None:
        pass

    def note_used(self, entry: Entry) -> None:
        pass

    def note_abandoned(self, entry: Entry) -> None:
        pass

    def note_freed(self, entry: Entry) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in blocks; the defaults limit nothing."""

    num_reserve_blocks: int = 0
    """Blocks that only granted preallocations may use, counting free and evictable blocks."""

    high_watermark: int | None = None
    """Blocks in use above which entries are evicted in the background; None never evicts."""

    low_watermark: int = 0
    """Blocks in use at which background eviction stops."""

    tenant_quotas: Mapping[str, int] = field(default_factory=dict)
    """Blocks each tenant may hold, reservations and entries together."""

    default_tenant_quota: int | None = None
    """Quota of tenants without one of their own; None is unlimited."""

    def quota_of(self, tenant: str) -> int | None:
        return self.tenant_quotas.get(tenant, self.default_tenant_quota)


@dataclass(slots=True)
class EvictableMap:
    by_start: dict[int, Entry] = field(default_factory=dict)
    by_end: dict[int, Entry] = field(default_factory=dict)

    def add_evictable(self, entry: Entry) -> None:
        self.by_start[entry.blocks.start] = entry
        self.by_end[entry.blocks.end] = entry

    def discard_evictable(self, entry: Entry) -> None:
        if self.by_start.pop(entry.blocks.start, None) is not None:
            del self.by_end[entry.blocks.end]


def cheapest_victims(
    num_blocks: int, pool: BestFitPool, evictable: EvictableMap, policy: EvictionPolicy, now: float
) -> list[Entry] | None:
    """Entries to evict for a free range of `num_blocks`; None if no range can be freed.

    Evicting the least recently used one by one frees ranges here and there; a large tensor then costs much
    more than its size. Instead: start at each of the entries that should go first, grow the range to the
    neighbour whose loss per block is smaller, left or right (free ranges join at once), until it is large
    enough or a used range stops it. The start with the smallest loss in total wins.
    """
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
        self, first: Entry, pool: BestFitPool, evictable: EvictableMap, policy: EvictionPolicy, now: float
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


@dataclass(slots=True)
class _Tenant:
    num_blocks: int = 0
    num_evictable_blocks: int = 0
    evictable: "OrderedDict[int, Entry]" = field(default_factory=OrderedDict)  # oldest use first


class TenantTable:
    """Blocks of reservations and entries, by tenant ("" for those without)."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def num_blocks(self, tenant: str) -> int:
        found = self._tenants.get(tenant)
        return 0 if found is None else found.num_blocks

    def num_evictable_blocks(self, tenant: str) -> int:
        found = self._tenants.get(tenant)
        return 0 if found is None else found.num_evictable_blocks

    def oldest_evictable(self, tenant: str) -> Entry:
        """Least recently used evictable entry of the tenant, which must have one."""
        return next(iter(self._tenants[tenant].evictable.values()))

    def add_blocks(self, entry: Entry) -> None:
        self._tenants.setdefault(entry.tenant, _Tenant()).num_blocks += entry.blocks.num_blocks

    def remove_blocks(self, entry: Entry) -> None:
        tenant = self._tenants[entry.tenant]
        tenant.num_blocks -= entry.blocks.num_blocks
        if tenant.num_blocks == 0:
            del self._tenants[entry.tenant]

    def became_evictable(self, entry: Entry) -> None:
        tenant = self._tenants[entry.tenant]
        tenant.evictable[entry.reservation_id] = entry
        tenant.num_evictable_blocks += entry.blocks.num_blocks

    def no_longer_evictable(self, entry: Entry) -> None:
        tenant = self._tenants[entry.tenant]
        del tenant.evictable[entry.reservation_id]
        tenant.num_evictable_blocks -= entry.blocks.num_blocks


@dataclass(slots=True)
class Space:
    """All blocks of one memory, each free, part of an entry, or held after its writer's death.

    `hold_s`: a GPU may still run a dead process's copy into its blocks; they are free after so many seconds.
    """

    table: EntryTable
    pool: BestFitPool
    policy: EvictionPolicy
    journal: EntryJournal
    limits: Limits = field(default_factory=Limits)
    tenants: TenantTable = field(default_factory=TenantTable)
    evictable: EvictableMap = field(default_factory=EvictableMap)
    num_evictable_blocks: int = 0
    num_evictions: int = 0
    hold_s: float = 0.0
    held: "deque[tuple[float, BlockRange]]" = field(default_factory=deque)  # when each is free, in order

    # ---- blocks ------------------------------------------------------------------------------------
    def try_allocate(self, num_blocks: int, now: float) -> BlockRange | None:
        """Allocate `num_blocks`, evicting the cheapest entries if needed; None if too much is in use."""
        blocks = self.pool.try_allocate(num_blocks)
        if blocks is not None or self.num_available_blocks < num_blocks:
            return blocks
        for victim in cheapest_victims(num_blocks, self.pool, self.evictable, self.policy, now) or ():
            self.evict(victim)
        while (blocks := self.pool.try_allocate(num_blocks)) is None:
            oldest = next(self.policy.candidates(1), None)
            if oldest is None:
                return None
            self.evict(oldest)
        return blocks

    def free_held(self, now: float) -> None:
        """Free blocks of dead writers whose time is over."""
        while self.held and self.held[0][0] <= now:
            self.pool.free(self.held.popleft()[1])

    @property
    def num_available_blocks(self) -> int:
        return self.pool.num_free_blocks + self.num_evictable_blocks

    def may_take(self, num_blocks: int, *, may_use_reserve: bool) -> bool:
        """True if taking `num_blocks` leaves the reserve whole, or may use it."""
        kept = 0 if may_use_reserve else self.limits.num_reserve_blocks
        return self.num_available_blocks - num_blocks >= kept

    def fit_quota(self, tenant: str, num_blocks: int) -> bool:
        """Evict the tenant's own entries, oldest first, until `num_blocks` more fit its quota."""
        quota = self.limits.quota_of(tenant)
        if quota is None:
            return True
        excess = self.tenants.num_blocks(tenant) + num_blocks - quota
        if excess > self.tenants.num_evictable_blocks(tenant):
            return False
        while self.tenants.num_blocks(tenant) + num_blocks > quota:
            self.evict(self.tenants.oldest_evictable(tenant))
        return True

    @property
    def needs_relief(self) -> bool:
        """True above the high watermark while something is evictable."""
        high = self.limits.high_watermark
        return high is not None and self._num_used > high and len(self.policy) > 0

    def relieve(self, max_evictions: int) -> bool:
        """Evict up to `max_evictions` entries, oldest first; True if the low watermark is not reached."""
        for _ in range(max_evictions):
            victim = next(self.policy.candidates(1), None)
            if victim is None or self._num_used <= self.limits.low_watermark:
                return False
            self.evict(victim)
        return True

    # ---- steps of an entry -----------------------------------------------------------------------
    def reserve(self, entry: Entry, writer_slot: int) -> None:
        """Record a new reservation in a range from `try_allocate`."""
        self.table.add_entry(entry)
        self.tenants.add_blocks(entry)
        self.journal.note_reserved(entry, writer_slot)

    def seal(self, entry: Entry, now: float) -> None:
        self.table.mark_sealed(entry, now)
        self.became_evictable(entry)
        self.journal.note_sealed(entry)

    def abandon(self, entry: Entry) -> None:
        """Stop waiting for the reservation; its blocks stay the writer's."""
        self.table.mark_abandoned(entry)
        self.journal.note_abandoned(entry)

    def pin(self, entry: Entry, now: float) -> None:
        if entry.state is EntryState.READY:
            self._no_longer_evictable(entry)
        self.table.mark_pinned(entry, now)

    def unpin(self, entry: Entry, now: float) -> None:
        self.table.mark_unpinned(entry, now)
        self.journal.note_used(entry)
        if entry.state is EntryState.READY:
            self.became_evictable(entry)

    def evict(self, entry: Entry) -> None:
        """Evict an unpinned sealed entry. Raises IllegalTransitionError: it is pinned, or not sealed."""
        self.table.mark_freed(entry)
        self._no_longer_evictable(entry)
        self._give_back(entry)
        self.num_evictions += 1

    def release(self, entry: Entry, died_at: float | None = None) -> None:
        """Free the blocks of an unsealed reservation that its writer has ended, or whose writer `died_at`."""
        if entry.state is EntryState.WRITING:
            self.table.mark_abandoned(entry)
        self.table.mark_freed(entry)
        if died_at is None or self.hold_s == 0 or entry.memory == REDIS:
            self._give_back(entry)
            return
        self._forget(entry)
        self.held.append((died_at + self.hold_s, entry.blocks))

    def evict_all(self) -> None:
        while (victim := next(self.policy.candidates(1), None)) is not None:
            self.evict(victim)

    def sealed_unpinned(self, mm_hash: MmHash) -> Entry | None:
        entry = self.table.find_sealed(mm_hash)
        return entry if entry is not None and entry.state is EntryState.READY else None

    def became_evictable(self, entry: Entry) -> None:
        """Record that a READY entry is evictable, as the most recently used."""
        self.policy.add_evictable(entry)
        self.evictable.add_evictable(entry)
        self.tenants.became_evictable(entry)
        self.num_evictable_blocks += entry.blocks.num_blocks

    # ---- inside ----------------------------------------------------------------------------------
    def _no_longer_evictable(self, entry: Entry) -> None:
        self.policy.discard_evictable(entry)
        self.evictable.discard_evictable(entry)
        self.tenants.no_longer_evictable(entry)
        self.num_evictable_blocks -= entry.blocks.num_blocks

    def _give_back(self, entry: Entry) -> None:
        self._forget(entry)
        self.pool.free(entry.blocks)

    def _forget(self, entry: Entry) -> None:
        self.tenants.remove_blocks(entry)
        self.journal.note_freed(entry)

    @property
    def _num_used(self) -> int:
        return self.pool.num_blocks - self.pool.num_free_blocks
