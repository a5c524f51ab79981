"""What the store reports of its state: entry states, statistics. Changes nothing."""

from typing import TYPE_CHECKING

from triptych_cache_store.entries.entry_table import EntryState, EntryTable
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.store import EntryInfo, StoreStats

if TYPE_CHECKING:
    from triptych_cache_store.core.state import StoreState


def entry_state(table: EntryTable, mm_hash: MmHash, now: float) -> EntryInfo:
    """State of one mm_hash; the sealed entry counts before reservations. `age_s`: since its last use."""
    entry = table.find_sealed(mm_hash)
    if entry is not None:
        return EntryInfo(
            mm_hash=mm_hash,
            state="pinned" if entry.state is EntryState.PINNED else "ready",
            spec=entry.spec,
            memory=entry.memory,
            num_pins=entry.num_pins,
            age_s=max(0.0, now - entry.last_used_at),
        )
    entry = table.find_writing(mm_hash)
    if entry is not None:
        age_s = max(0.0, now - entry.reserved_at)
        return EntryInfo(mm_hash=mm_hash, state="writing", spec=entry.spec, age_s=age_s, memory=entry.memory)
    return EntryInfo(mm_hash=mm_hash, state="absent")


def stats(seq: int, state: "StoreState") -> StoreStats:
    """Bytes are whole blocks: free and those of all states add up to `region_num_bytes` (without headers)."""
    layout, space, leases, counters = state.identity.layout, state.space, state.leases, state.counters
    num_bytes = space.table.num_bytes
    slab = state.slab
    return StoreStats(
        seq=seq,
        generation=state.identity.generation,
        region_num_bytes=layout.data_num_bytes,
        free_num_bytes=space.pool.num_free_blocks * layout.block_num_bytes,
        writing_num_bytes=num_bytes[EntryState.WRITING],
        ready_num_bytes=num_bytes[EntryState.READY],
        pinned_num_bytes=num_bytes[EntryState.PINNED],
        abandoned_num_bytes=num_bytes[EntryState.ABANDONED],
        num_entries=space.table.num_entries,
        num_reservations=space.table.num_reservations,
        num_pins=leases.num_pins,
        num_watches=leases.num_watches,
        num_sessions=leases.num_sessions,
        num_seals_total=counters.num_seals,
        num_hits_total=counters.num_hits,
        num_misses_total=counters.num_misses,
        num_evictions_total=space.num_evictions + (0 if slab is None else slab.space.num_evictions),
        slab_num_bytes=0 if slab is None else slab.space.pool.num_blocks * layout.block_num_bytes,
        slab_free_num_bytes=0 if slab is None else slab.space.pool.num_free_blocks * layout.block_num_bytes,
    )
