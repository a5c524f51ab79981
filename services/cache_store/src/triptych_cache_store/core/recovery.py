"""Recovery: a store takes up what the store before it left in the region.

    client slot   its client holds the kernel lock  -> a detached lease; else cleared
    entry READY                                     -> READY, oldest use first in line for eviction
    entry WRITING, ABANDONED   its writer lives     -> as it was, in the writer's lease; else cleared
    pin           its client lives, its entry is READY -> PINNED; else cleared

Damaged records, and entries of another namespace without a pin, are dropped. Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass

from triptych_cache_store.core.state import StoreState
from triptych_cache_store.entries.block_pool import BlockRange
from triptych_cache_store.entries.entry_table import Entry, EntryState
from triptych_cache_store.entries.leases import Lease, Pin
from triptych_common.protocol.ids import MmHash, PinId, ReservationId
from triptych_common.protocol.store import TensorSpec
from triptych_common.region import records


@dataclass(slots=True)
class RecoveryResult:
    num_entries: int = 0
    num_reservations: int = 0
    num_pins: int = 0
    num_clients: int = 0
    num_dropped: int = 0
    num_damaged: int = 0  # their bytes are not what they were; of the dropped, or kept by a pin


IsIntact = Callable[[Entry, int], bool]
"""Compares an entry's bytes with the checksum in its header."""


def trust(entry: Entry, checksum: int) -> bool:
    """Accept every entry as intact."""
    return True


def recover(
    state: StoreState,
    *,
    is_alive: Callable[[int], bool],
    namespace: str | None,
    now: float,
    is_intact: IsIntact = trust,
) -> RecoveryResult:
    """Fill the empty `state` from its journal. Entries of namespaces other than `namespace` are dropped, if
    given."""
    return _Recovery(state, is_alive, namespace, is_intact).recover(now)


class _Recovery:
    def __init__(
        self, state: StoreState, is_alive: Callable[[int], bool], namespace: str | None, is_intact: IsIntact
    ) -> None:
        self._state = state
        self._is_alive = is_alive
        self._namespace = namespace
        self._is_intact = is_intact
        self._leases: dict[int, Lease] = {}  # slot -> lease
        self._last_id = 0
        self._result = RecoveryResult()

    def recover(self, now: float) -> RecoveryResult:
        state, journal = self._state, self._state.journal
        self._recover_leases(now)
        pins = [(index, pin) for index, pin in journal.pin_records() if pin.slot in self._leases]
        entries = self._recover_entries({pin.block for _, pin in pins})
        state.space.pool.restore(entry.blocks for entry in entries.values())
        sealed = {block: entry for block, entry in entries.items() if entry.state is EntryState.READY}
        for entry in sorted(sealed.values(), key=lambda entry: entry.last_used_at):
            state.space.became_evictable(entry)
        kept = {index: pin for index, pin in pins if pin.block in sealed}
        journal.keep_only(set(self._leases), {index: pin.pin_id for index, pin in kept.items()})
        for pin in kept.values():
            entry = sealed[pin.block]
            state.space.pin(entry, now)
            lease = self._leases[pin.slot]
            state.leases.add_pin(Pin(PinId(pin.pin_id), entry, lease, pin.num_holders, pin.origin_seq))
            self._last_id = max(self._last_id, pin.pin_id)
        state.start_ids_after(self._last_id)
        self._result.num_pins = len(kept)
        return self._result

    def _recover_leases(self, now: float) -> None:
        for slot, record in self._state.journal.slots():
            if self._is_alive(slot) and self._state.leases.find_by_client(record.client) is None:
                lease = Lease(record.lease_id, slot, None, record.client, record.namespace)
                lease.last_seq, lease.opened_at = record.last_seq, now
                self._state.leases.add_lease(lease)
                self._leases[slot] = lease
                self._last_id = max(self._last_id, record.lease_id)
        self._result.num_clients = len(self._leases)

    def _recover_entries(self, pinned_blocks: set[int]) -> dict[int, Entry]:
        """Restored entries by first block, in ascending order."""
        entries: dict[int, Entry] = {}
        end = 0
        for block, record, marks in self._state.journal.entries():
            entry = None if record is None or block < end else self._entry(block, record, marks)
            writer = None if record is None else self._leases.get(record.writer_slot)
            if entry is None or not self._take(entry, marks, writer, block in pinned_blocks):
                self._state.journal.drop_entry(block)
                self._result.num_dropped += 1
                continue
            entries[block] = entry
            self._state.space.tenants.add_blocks(entry)
            end = entry.blocks.end
            self._last_id = max(self._last_id, entry.reservation_id)
        return entries

    def _entry(self, block: int, record: records.EntryRecord, marks: records.EntryMarks) -> Entry | None:
        layout = self._state.identity.layout
        blocks = BlockRange(block, record.num_blocks)
        if blocks.end > layout.num_blocks or record.num_bytes > blocks.num_blocks * layout.block_num_bytes:
            return None
        return Entry(
            reservation_id=ReservationId(record.reservation_id),
            mm_hash=MmHash(record.mm_hash),
            spec=TensorSpec(shape=record.shape, dtype=record.dtype, num_bytes=record.num_bytes),
            blocks=blocks,
            generation=record.generation,
            namespace=record.namespace,
            reserved_at=record.reserved_at,
            last_used_at=marks.last_used_at,
            requester_lease=record.requester_lease,
            origin_seq=record.origin_seq,
            tenant=record.tenant,
            memory=record.memory,
        )

    def _take(self, entry: Entry, marks: records.EntryMarks, writer: Lease | None, is_pinned: bool) -> bool:
        """Put `entry` into the tables; False drops it."""
        table = self._state.table
        if marks.state == records.READY:
            is_foreign = self._namespace is not None and entry.namespace != self._namespace
            if table.find_sealed(entry.mm_hash) is not None or (is_foreign and not is_pinned):
                return False
            if marks.checksum is None:
                self._state.verify_queue.queue_checksum(entry)
            elif not self._is_intact(entry, marks.checksum):
                self._result.num_damaged += 1
                entry.is_damaged = True
                if not is_pinned:
                    return False
            table.add_entry(entry)
            table.mark_sealed(entry, entry.last_used_at)
            self._result.num_entries += 1
            return True
        if writer is None:
            return False
        table.add_entry(entry)
        if marks.state == records.ABANDONED:
            table.mark_abandoned(entry)
        self._state.leases.add_reservation(writer, entry)
        self._result.num_reservations += 1
        return True
