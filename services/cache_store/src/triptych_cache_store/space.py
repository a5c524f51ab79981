"""Space: allocation that evicts when it must. Joins table, pool and policy. Pure."""

from dataclasses import dataclass

from triptych_cache_store.block_pool import BlockPool, BlockRange
from triptych_cache_store.entry_table import Entry, EntryState, EntryTable
from triptych_cache_store.eviction import EvictionPolicy
from triptych_common.protocol.ids import MmHash


@dataclass(slots=True)
class Space:
    """Owner of the steps that change table, pool and policy together."""

    table: EntryTable
    pool: BlockPool
    policy: EvictionPolicy
    num_evictions: int = 0

    def try_allocate(self, num_blocks: int) -> BlockRange | None:
        """A range of `num_blocks`, evicting what the policy names until there is one; None: all is in use."""
        while (blocks := self.pool.try_allocate(num_blocks)) is None:
            victim = self.policy.next_victim()
            if victim is None:
                return None
            self.evict(victim)
        return blocks

    def seal(self, entry: Entry, now: float) -> None:
        self.table.seal(entry, now)
        self.policy.add(entry)

    def pin(self, entry: Entry, now: float) -> None:
        self.policy.discard(entry)
        self.table.pin(entry, now)

    def unpin(self, entry: Entry, now: float) -> None:
        self.table.unpin(entry, now)
        if entry.state is EntryState.READY:
            self.policy.add(entry)

    def evict(self, entry: Entry) -> None:
        """An unpinned sealed entry goes.

        Raises:
            IllegalTransitionError: it is pinned, or not sealed.
        """
        self._free(entry)
        self.policy.discard(entry)
        self.num_evictions += 1

    def release(self, entry: Entry) -> None:
        """The writer of a reservation is done with its blocks, and the entry is not to be sealed."""
        if entry.state is EntryState.WRITING:
            self.table.abandon(entry)
        self._free(entry)

    def evict_all(self) -> None:
        while (victim := self.policy.next_victim()) is not None:
            self.evict(victim)

    def evictable(self, mm_hash: MmHash) -> Entry | None:
        entry = self.table.sealed(mm_hash)
        return entry if entry is not None and entry.state is EntryState.READY else None

    def _free(self, entry: Entry) -> None:
        self.table.free(entry)
        self.pool.free(entry.blocks)
