"""Journal: the store's state in the region's headers, for the store that starts next.

Every change is written before its reply is sent. `core.recovery` reads it back.
"""

import hashlib
from collections.abc import Iterator

from triptych_cache_store.entries.entry_table import Entry
from triptych_cache_store.entries.space import EntryJournal
from triptych_common.region import records
from triptych_common.region.layout import (
    CLIENT_SLOT_BYTES,
    ENTRY_HEADER_BYTES,
    PIN_RECORD_BYTES,
    RegionLayout,
)


class RegionJournal(EntryJournal):
    """Writes records of clients, pins and entries; owns the free slots and pin records."""

    def __init__(self, buffer: memoryview, layout: RegionLayout) -> None:
        self._buffer = buffer
        self._layout = layout
        self._free_slots = list(range(layout.num_client_slots - 1, -1, -1))  # the lowest is taken first
        self._free_pins = list(range(layout.num_pin_records - 1, -1, -1))
        self._pins: dict[int, int] = {}  # pin_id -> record

    # ---- clients ---------------------------------------------------------------------------------
    def try_open_slot(self, lease_id: int, client: str, namespace: str) -> int | None:
        """Slot for a new session; None if all are in use."""
        if not self._free_slots:
            return None
        slot = self._free_slots.pop()
        record = records.SlotRecord(lease_id, client, namespace, last_seq=0)
        records.write_slot(self._buffer, self._slot_offset(slot), record)
        return slot

    def close_slot(self, slot: int) -> None:
        records.clear(self._buffer, self._slot_offset(slot))
        self._free_slots.append(slot)

    def note_seq(self, slot: int, seq: int) -> None:
        """Record that command `seq` of the client in `slot` is being executed."""
        records.write_last_seq(self._buffer, self._slot_offset(slot), seq)

    # ---- pins ------------------------------------------------------------------------------------
    @property
    def num_free_pins(self) -> int:
        return len(self._free_pins)

    def note_pinned(self, pin: records.PinRecord) -> None:
        """Record a pin; the caller has checked that a record is free."""
        index = self._free_pins.pop()
        self._pins[pin.pin_id] = index
        records.write_pin(self._buffer, self._pin_offset(index), pin)

    def note_holders(self, pin_id: int, num_holders: int) -> None:
        records.write_num_holders(self._buffer, self._pin_offset(self._pins[pin_id]), num_holders)

    def note_unpinned(self, pin_id: int) -> None:
        index = self._pins.pop(pin_id)
        records.clear(self._buffer, self._pin_offset(index))
        self._free_pins.append(index)

    # ---- entries ---------------------------------------------------------------------------------
    def note_reserved(self, entry: Entry, writer_slot: int) -> None:
        record = records.EntryRecord(
            num_blocks=entry.blocks.num_blocks,
            writer_slot=writer_slot,
            dtype=entry.spec.dtype,
            shape=entry.spec.shape,
            num_bytes=entry.spec.num_bytes,
            generation=entry.generation,
            reservation_id=entry.reservation_id,
            requester_lease=entry.requester_lease,
            origin_seq=entry.origin_seq,
            reserved_at=entry.reserved_at,
            mm_hash=entry.mm_hash,
            namespace=entry.namespace,
            tenant=entry.tenant,
            memory=entry.memory,
        )
        records.write_entry(self._buffer, self._entry_offset(entry), record)

    def note_sealed(self, entry: Entry) -> None:
        records.write_last_used(self._buffer, self._entry_offset(entry), entry.last_used_at)
        records.write_state(self._buffer, self._entry_offset(entry), records.READY)

    def note_used(self, entry: Entry) -> None:
        records.write_last_used(self._buffer, self._entry_offset(entry), entry.last_used_at)

    def note_abandoned(self, entry: Entry) -> None:
        records.write_state(self._buffer, self._entry_offset(entry), records.ABANDONED)

    def note_freed(self, entry: Entry) -> None:
        records.clear(self._buffer, self._entry_offset(entry))

    def note_checksum(self, entry: Entry, checksum: int) -> None:
        records.write_checksum(self._buffer, self._entry_offset(entry), checksum)

    def checksum_of(self, entry: Entry) -> int | None:
        return records.read_marks(self._buffer, self._entry_offset(entry)).checksum

    def has_intact_header(self, entry: Entry) -> bool:
        """True if the header of a sealed `entry` is as the store wrote it."""
        offset = self._entry_offset(entry)
        record, marks = records.read_entry(self._buffer, offset), records.read_marks(self._buffer, offset)
        return (
            record is not None
            and marks.state == records.READY
            and (record.mm_hash, record.generation, record.reservation_id)
            == (entry.mm_hash, entry.generation, entry.reservation_id)
            and (record.num_blocks, record.num_bytes) == (entry.blocks.num_blocks, entry.spec.num_bytes)
            and (record.dtype, record.shape) == (entry.spec.dtype, entry.spec.shape)
        )

    # ---- reading what an earlier store left ------------------------------------------------------
    def slots(self) -> Iterator[tuple[int, records.SlotRecord]]:
        for slot in range(self._layout.num_client_slots):
            record = records.read_slot(self._buffer, self._slot_offset(slot))
            if record is not None:
                yield slot, record

    def pin_records(self) -> Iterator[tuple[int, records.PinRecord]]:
        for index in range(self._layout.num_pin_records):
            record = records.read_pin(self._buffer, self._pin_offset(index))
            if record is not None:
                yield index, record

    def entries(self) -> Iterator[tuple[int, records.EntryRecord | None, records.EntryMarks]]:
        """Headers in use with their first block; a damaged record is None."""
        first = self._layout.entries_offset
        last = records.entry_offset(self._layout, self._layout.num_blocks)
        states = bytes(self._buffer[first:last:ENTRY_HEADER_BYTES])
        for block, state in enumerate(states):
            if state:
                offset = records.entry_offset(self._layout, block)
                yield (
                    block,
                    records.read_entry(self._buffer, offset),
                    records.read_marks(self._buffer, offset),
                )

    def keep_only(self, slots: set[int], pins: dict[int, int]) -> None:
        """Clear all slots and pin records but these (`pins`: record -> pin_id)."""
        for slot in range(self._layout.num_client_slots):
            if slot not in slots:
                records.clear(self._buffer, self._slot_offset(slot))
        for index in range(self._layout.num_pin_records):
            if index not in pins:
                records.clear(self._buffer, self._pin_offset(index))
        self._free_slots = [slot for slot in self._free_slots if slot not in slots]
        self._free_pins = [index for index in self._free_pins if index not in pins]
        self._pins = {pin_id: index for index, pin_id in pins.items()}

    def drop_entry(self, block: int) -> None:
        records.clear(self._buffer, records.entry_offset(self._layout, block))

    # ---- where -----------------------------------------------------------------------------------
    def _slot_offset(self, slot: int) -> int:
        return self._layout.slots_offset + slot * CLIENT_SLOT_BYTES

    def _pin_offset(self, index: int) -> int:
        return self._layout.pins_offset + index * PIN_RECORD_BYTES

    def _entry_offset(self, entry: Entry) -> int:
        return records.entry_offset(self._layout, entry.blocks.start)


def short_namespace(digest: str | None) -> str:
    """Namespace digest shortened to fit a header."""
    text = digest or ""
    if len(text.encode()) > records.MAX_NAMESPACE_BYTES:
        return hashlib.sha256(text.encode()).hexdigest()
    return text
