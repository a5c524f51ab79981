"""Store commands, one method each. Pure; a refused command changes nothing but may have evicted entries."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from triptych_cache_store.core.metrics import render
from triptych_cache_store.core.state import MAX_VERIFY_REQUESTS, Out, Refusal, StoreState, VerifyRequest
from triptych_cache_store.entries.entry_table import Entry, EntryState, EntryTable
from triptych_cache_store.entries.leases import Lease, Watch
from triptych_common.protocol import store as wire
from triptych_common.protocol.ids import MmHash, PinId, ReservationId
from triptych_common.protocol.store import EntryInfo, StoreStats

Handler = Callable[[Lease, Any, float, Out], wire.StoreReply | None]
"""Handler of one command; a None reply is sent later."""


def entry_state(table: EntryTable, mm_hash: MmHash, now: float) -> EntryInfo:
    """State of one mm_hash; a sealed entry takes precedence over reservations. `age_s` counts from its last
    use."""
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


def stats(seq: int, state: StoreState) -> StoreStats:
    """Statistics in whole blocks: free bytes and those of all states add up to `region_num_bytes`."""
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


class Commands:
    """Commands of an attached session; `handlers` finds each by its type."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self.handlers: dict[type[wire.StoreFrame], Handler] = {
            wire.Ping: self._ping,
            wire.Reserve: self._reserve,
            wire.Seal: self._seal,
            wire.Cancel: self._cancel,
            wire.PinOrWatch: self._pin_or_watch,
            wire.Unwatch: self._unwatch,
            wire.Unpin: self._unpin,
            wire.Lookup: self._lookup,
            wire.StatsQuery: self._stats,
            wire.ListEntries: self._list,
            wire.Evict: self._evict,
            wire.Verify: self._verify,
            wire.MetricsQuery: self._metrics,
        }

    def _ping(self, lease: Lease, command: wire.Ping, now: float, out: Out) -> wire.StoreReply:
        return wire.Done(seq=command.seq)

    # ---- producing -------------------------------------------------------------------------------
    def _reserve(self, lease: Lease, command: wire.Reserve, now: float, out: Out) -> wire.StoreReply:
        state, spec, mm_hash = self._state, command.spec, MmHash(command.mm_hash)
        if math.prod(spec.shape) * wire.DTYPE_BYTES[spec.dtype] != spec.num_bytes:
            raise Refusal("spec_mismatch", f"{spec.dtype} {spec.shape} is not {spec.num_bytes} bytes")
        present = state.table.find_sealed(mm_hash) or state.table.find_writing(mm_hash)
        if present is not None and present.spec != spec:
            raise Refusal("spec_mismatch", f"the entry is {present.spec.dtype} {present.spec.shape}")
        if present is not None and present.state is not EntryState.WRITING:
            return wire.AlreadySealed(seq=command.seq, spec=present.spec, memory=present.memory)
        writer = lease if command.writer is None else state.leases.find_by_client(command.writer)
        if writer is None:
            raise Refusal("unknown_writer", f"{command.writer} has no session")
        space = state.space_in(command.memory)
        if space is None:
            raise Refusal("too_large", f"the store has no memory {command.memory}")
        num_blocks = state.identity.layout.num_blocks_for(spec.num_bytes)
        if num_blocks > space.pool.num_blocks:
            raise Refusal("too_large", f"{spec.num_bytes} bytes exceed the region")
        if not space.may_take(num_blocks, may_use_reserve=command.may_use_reserve):
            raise Refusal("full", f"{spec.num_bytes} bytes are not free, or kept for granted preallocations")
        tenant = command.tenant or ""
        if not space.fit_quota(tenant, num_blocks):
            raise Refusal("full", f"{spec.num_bytes} bytes exceed the quota of the tenant")
        blocks = space.try_allocate(num_blocks, now)
        if blocks is None:
            raise Refusal("full", f"no {spec.num_bytes} bytes in one free range")
        entry = Entry(
            reservation_id=ReservationId(next(state.ids)),
            mm_hash=mm_hash,
            spec=spec,
            blocks=blocks,
            generation=state.identity.generation,
            namespace=writer.namespace,
            reserved_at=now,
            requester_lease=lease.lease_id,
            origin_seq=command.seq,
            tenant=tenant,
            memory=command.memory,
            producer=writer.instance,
        )
        space.reserve(entry, writer.slot)
        state.leases.add_reservation(writer, entry)
        return wire.Reserved(
            seq=command.seq,
            reservation_id=entry.reservation_id,
            offset=state.offset_of(entry),
            generation=entry.generation,
            memory=entry.memory,
        )

    def _seal(self, lease: Lease, command: wire.Seal, now: float, out: Out) -> wire.StoreReply:
        entry = self._reservation(command.reservation_id)
        if self._state.leases.writer_of(entry.reservation_id) is not lease:
            raise Refusal("not_owner", f"reservation {entry.reservation_id} is written by another session")
        if entry.state is EntryState.ABANDONED or self._state.table.find_sealed(entry.mm_hash) is not None:
            self._state.release_reservation(entry, out)  # cancelled, or another was sealed first
        else:
            self._state.seal(entry, now, out)
        return wire.Done(seq=command.seq)

    def _cancel(self, lease: Lease, command: wire.Cancel, now: float, out: Out) -> wire.StoreReply:
        entry = self._reservation(command.reservation_id)
        writer = self._state.leases.writer_of(entry.reservation_id)
        if lease is writer:
            self._state.release_reservation(entry, out)
            return wire.Done(seq=command.seq)
        if lease.lease_id != entry.requester_lease and lease.instance != writer.instance:
            raise Refusal("not_owner", f"reservation {entry.reservation_id} belongs to another instance")
        if command.is_unwritten and lease.instance == writer.instance:
            self._state.release_reservation(entry, out)
        elif entry.state is EntryState.WRITING:  # the writer may be writing now: its blocks wait for it
            self._state.space_of(entry).abandon(entry)
            self._state.push_writer_lost(entry.mm_hash, out)
        return wire.Done(seq=command.seq)

    # ---- consuming -------------------------------------------------------------------------------
    def _pin_or_watch(self, lease: Lease, command: wire.PinOrWatch, now: float, out: Out) -> wire.StoreReply:
        state, mm_hash = self._state, MmHash(command.mm_hash)
        if not state.has_room_for_pin():
            raise Refusal("full", "the store has no free pin record")
        entry = state.table.find_sealed(mm_hash)
        if entry is None:
            state.counters.num_misses += 1
            state.leases.add_watch(lease, mm_hash, Watch(command.num_holders, command.seq))
            return wire.Watching(seq=command.seq, mm_hash=mm_hash, writing=state.table.is_writing(mm_hash))
        state.counters.num_hits += 1
        pin = state.pin(lease, entry, command.num_holders, command.seq, now)
        return wire.Pinned(seq=command.seq, pin_id=pin.pin_id, descriptor=state.describe(entry))

    def _unwatch(self, lease: Lease, command: wire.Unwatch, now: float, out: Out) -> wire.StoreReply:
        self._state.leases.end_watch(lease, MmHash(command.mm_hash))
        return wire.Done(seq=command.seq)

    def _unpin(self, lease: Lease, command: wire.Unpin, now: float, out: Out) -> wire.StoreReply:
        pin = self._state.leases.find_pin(PinId(command.pin_id))
        if pin is None:
            raise Refusal("unknown_pin", f"no pin {command.pin_id}")
        if lease.instance != pin.lease.instance:
            raise Refusal("not_owner", f"pin {pin.pin_id} belongs to another instance")
        if pin.num_holders == 1:
            self._state.end_pin(pin, now)
        else:
            pin.num_holders -= 1
            self._state.journal.note_holders(pin.pin_id, pin.num_holders)
        return wire.Done(seq=command.seq)

    # ---- lookups, and the operator ---------------------------------------------------------------
    def _lookup(self, lease: Lease, command: wire.Lookup, now: float, out: Out) -> wire.StoreReply:
        entries = tuple(entry_state(self._state.table, MmHash(each), now) for each in command.mm_hashes)
        return wire.Entries(seq=command.seq, entries=entries)

    def _stats(self, lease: Lease, command: wire.StatsQuery, now: float, out: Out) -> wire.StoreReply:
        return stats(command.seq, self._state)

    def _list(self, lease: Lease, command: wire.ListEntries, now: float, out: Out) -> wire.StoreReply:
        behind = (each for each in self._mm_hashes() if command.after is None or each > command.after)
        mm_hashes = heapq.nsmallest(min(command.limit, wire.MAX_LISTED), behind)
        entries = tuple(entry_state(self._state.table, each, now) for each in mm_hashes)
        return wire.Entries(seq=command.seq, entries=entries)

    def _evict(self, lease: Lease, command: wire.Evict, now: float, out: Out) -> wire.StoreReply:
        state = self._state
        if command.mm_hash is None:
            for space in state.spaces:
                space.evict_all()
        elif (entry := state.space.sealed_unpinned(MmHash(command.mm_hash))) is not None:
            state.space_of(entry).evict(entry)
        return wire.Done(seq=command.seq)

    def _verify(self, lease: Lease, command: wire.Verify, now: float, out: Out) -> None:
        requests = self._state.verify_queue.requests
        if len(requests) >= MAX_VERIFY_REQUESTS:
            raise Refusal("full", f"{len(requests)} others wait for their report")
        if lease.session_id is not None:
            requests.append(VerifyRequest(lease.session_id, command))

    def _metrics(self, lease: Lease, command: wire.MetricsQuery, now: float, out: Out) -> wire.StoreReply:
        return wire.StoreMetrics(seq=command.seq, text=render(self._state, now))

    def _mm_hashes(self) -> Iterator[MmHash]:
        table = self._state.table
        seen: set[MmHash] = set()
        for entry in itertools.chain(table.all_sealed(), table.all_unsealed()):
            if entry.state is not EntryState.ABANDONED and entry.mm_hash not in seen:
                seen.add(entry.mm_hash)
                yield entry.mm_hash

    def _reservation(self, reservation_id: int) -> Entry:
        entry = self._state.table.find_reservation(ReservationId(reservation_id))
        if entry is None:
            raise Refusal("unknown_reservation", f"no reservation {reservation_id}")
        return entry
