"""Space: one memory's entries and blocks; combines table, pool, policy and journal, and evicts when needed.
Pure."""

from collections import OrderedDict
from dataclasses import dataclass, field

from triptych_cache_store.entries.block_pool import BlockPool, BlockRange
from triptych_cache_store.entries.entry_journal import EntryJournal
from triptych_cache_store.entries.entry_table import Entry, EntryState, EntryTable
from triptych_cache_store.entries.eviction import EvictionPolicy
from triptych_cache_store.entries.eviction_window import EvictableMap, cheapest_victims
from triptych_cache_store.entries.limits import Limits
from triptych_common.protocol.ids import MmHash


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
    """All blocks of one memory, each free or part of an entry."""

    table: EntryTable
    pool: BlockPool
    policy: EvictionPolicy
    journal: EntryJournal
    limits: Limits = field(default_factory=Limits)
    tenants: TenantTable = field(default_factory=TenantTable)
    evictable: EvictableMap = field(default_factory=EvictableMap)
    num_evictable_blocks: int = 0
    num_evictions: int = 0

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

    @property
    def num_available_blocks(self) -> int:
        """Number of blocks that are free or can be freed by eviction."""
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
        """Evict an unpinned sealed entry.

        Raises:
            IllegalTransitionError: it is pinned, or not sealed.
        """
        self.table.mark_freed(entry)
        self._no_longer_evictable(entry)
        self._give_back(entry)
        self.num_evictions += 1

    def release(self, entry: Entry) -> None:
        """Free the blocks of a reservation that its writer has ended and that is not sealed."""
        if entry.state is EntryState.WRITING:
            self.table.mark_abandoned(entry)
        self.table.mark_freed(entry)
        self._give_back(entry)

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
        self.tenants.remove_blocks(entry)
        self.journal.note_freed(entry)
        self.pool.free(entry.blocks)

    @property
    def _num_used(self) -> int:
        return self.pool.num_blocks - self.pool.num_free_blocks
