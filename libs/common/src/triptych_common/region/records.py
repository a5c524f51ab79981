"""Formats of the headers in the region (where they are: `layout`). Little endian; pure, on any buffer.

The store writes each record so that being killed at any instruction leaves it whole or absent: the body
first, with its checksum, then the one byte that makes it count. Clients read them and never write.
"""

import struct
import zlib
from dataclasses import dataclass

from triptych_common.protocol.store import REDIS, SHM, DType
from triptych_common.region.layout import ENTRY_HEADER_BYTES, RegionLayout, RegionLayoutError

MAGIC = b"TRIPTYCH"
REGION_VERSION = 1
MAX_NAMESPACE_BYTES = 64

WRITING, READY, ABANDONED = 1, 2, 3  # states of an entry header; 0: none
DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")
MEMORIES = (SHM, REDIS)  # what a header can name; entries of a slab have none
NO_BLOCK = 2**32 - 1  # in the record of a pin on an entry of the slab, which ends with the store

_REGION = struct.Struct("<8sIQQQQQ16s")  # magic, version, block bytes, blocks, pins, slots, generation, id
_CRC = struct.Struct("<I")
REGION_HEADER_NUM_BYTES = _REGION.size + _CRC.size
_SLOT = struct.Struct("<BxxxIQQ200s64s")  # used, crc, last seq, lease id, client, namespace
_PIN = struct.Struct("<BxHIIxxxxQQ")  # used, slot, block, holders, pin id, origin seq
_ENTRY_MARKS = struct.Struct("<BBxxId")  # state, has checksum, payload checksum, last used
_ENTRY_BODY = struct.Struct("<IHBBQQQQQQQd32s64s64s")
_U32, _U64, _F64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<d")
_BODY_CRC_AT = _ENTRY_MARKS.size
_BODY_AT = _BODY_CRC_AT + _CRC.size


@dataclass(frozen=True, slots=True)
class RegionHeader:
    """Identity of a region file; `region_id` is new for every file, `generation` for every store start."""

    layout: RegionLayout
    generation: int
    region_id: bytes  # 16 bytes


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """A session that holds, or held when its store died, a slot."""

    lease_id: int
    client: str
    namespace: str
    last_seq: int  # commands up to this seq were carried out


@dataclass(frozen=True, slots=True)
class PinRecord:
    """A pin on the entry that starts at `block`."""

    pin_id: int
    slot: int
    block: int
    num_holders: int
    origin_seq: int  # seq of the `PinOrWatch` that led to it


@dataclass(frozen=True, slots=True)
class EntryRecord:
    """An entry, kept in the header of its first block."""

    num_blocks: int
    writer_slot: int
    dtype: DType
    shape: tuple[int, int]
    num_bytes: int
    generation: int
    reservation_id: int
    requester_lease: int  # lease id of the session that asked for the reservation
    origin_seq: int  # seq of its `Reserve`
    reserved_at: float  # monotonic seconds of this boot, as `last_used_at`
    mm_hash: str
    namespace: str
    tenant: str
    memory: str = SHM


@dataclass(frozen=True, slots=True)
class EntryMarks:
    state: int
    checksum: int | None  # first 4 bytes of the BLAKE3 of the tensor's bytes, little endian, once taken
    last_used_at: float


# ---- the region ----------------------------------------------------------------------------------
def write_region_header(buffer: memoryview, header: RegionHeader) -> None:
    layout = header.layout
    body = _REGION.pack(
        MAGIC, REGION_VERSION, layout.block_num_bytes, layout.num_blocks, layout.num_pin_records,
        layout.num_client_slots, header.generation, header.region_id,
    )  # fmt: skip
    buffer[: len(body) + _CRC.size] = body + _CRC.pack(zlib.crc32(body))


def read_region_header(buffer: memoryview) -> RegionHeader | None:
    """Return the header, or None if none was ever written.

    Raises:
        RegionLayoutError: not a region, of another version, or damaged.
    """
    body = bytes(buffer[: _REGION.size])
    magic, version, block_num_bytes, num_blocks, num_pins, num_slots, generation, region_id = _REGION.unpack(
        body
    )
    if magic == bytes(len(MAGIC)):
        return None
    if magic != MAGIC:
        raise RegionLayoutError("the file is not a region of Triptych")
    if version != REGION_VERSION:
        raise RegionLayoutError(f"the region has version {version}, this store writes {REGION_VERSION}")
    if _CRC.unpack_from(buffer, _REGION.size)[0] != zlib.crc32(body):
        raise RegionLayoutError("the region's header is damaged")
    return RegionHeader(RegionLayout(block_num_bytes, num_blocks, num_pins, num_slots), generation, region_id)


# ---- client slots --------------------------------------------------------------------------------
def write_slot(buffer: memoryview, offset: int, slot: SlotRecord) -> None:
    client, namespace = slot.client.encode(), slot.namespace.encode()
    crc = _slot_crc(slot.lease_id, client, namespace)
    _SLOT.pack_into(buffer, offset, 0, crc, slot.last_seq, slot.lease_id, client, namespace)
    buffer[offset] = 1


def write_last_seq(buffer: memoryview, offset: int, last_seq: int) -> None:
    _U64.pack_into(buffer, offset + 8, last_seq)


def read_slot(buffer: memoryview, offset: int) -> SlotRecord | None:
    """Return the slot's record; None if it is unused or incompletely written."""
    used, crc, last_seq, lease_id, client, namespace = _SLOT.unpack_from(buffer, offset)
    client, namespace = client.rstrip(b"\0"), namespace.rstrip(b"\0")
    if used != 1 or crc != _slot_crc(lease_id, client, namespace):
        return None
    return SlotRecord(lease_id, client.decode(), namespace.decode(), last_seq)


def _slot_crc(lease_id: int, client: bytes, namespace: bytes) -> int:
    return zlib.crc32(b"%d\0%b\0%b" % (lease_id, client, namespace))


# ---- pins ----------------------------------------------------------------------------------------
def write_pin(buffer: memoryview, offset: int, pin: PinRecord) -> None:
    _PIN.pack_into(buffer, offset, 0, pin.slot, pin.block, pin.num_holders, pin.pin_id, pin.origin_seq)
    buffer[offset] = 1


def write_num_holders(buffer: memoryview, offset: int, num_holders: int) -> None:
    _U32.pack_into(buffer, offset + 8, num_holders)


def read_pin(buffer: memoryview, offset: int) -> PinRecord | None:
    used, slot, block, num_holders, pin_id, origin_seq = _PIN.unpack_from(buffer, offset)
    return PinRecord(pin_id, slot, block, num_holders, origin_seq) if used == 1 else None


def clear(buffer: memoryview, offset: int) -> None:
    """Clear the record of a slot, pin or entry at `offset`."""
    buffer[offset] = 0


# ---- entries -------------------------------------------------------------------------------------
def write_entry(buffer: memoryview, offset: int, entry: EntryRecord) -> None:
    body = _ENTRY_BODY.pack(
        entry.num_blocks, entry.writer_slot, DTYPES.index(entry.dtype), MEMORIES.index(entry.memory),
        *entry.shape, entry.num_bytes, entry.generation, entry.reservation_id, entry.requester_lease,
        entry.origin_seq, entry.reserved_at,
        bytes.fromhex(entry.mm_hash), entry.namespace.encode(), entry.tenant.encode(),
    )  # fmt: skip
    _ENTRY_MARKS.pack_into(buffer, offset, 0, 0, 0, 0.0)
    _CRC.pack_into(buffer, offset + _BODY_CRC_AT, zlib.crc32(body))
    buffer[offset + _BODY_AT : offset + _BODY_AT + len(body)] = body
    buffer[offset] = WRITING


def write_state(buffer: memoryview, offset: int, state: int) -> None:
    buffer[offset] = state


def write_last_used(buffer: memoryview, offset: int, last_used_at: float) -> None:
    _F64.pack_into(buffer, offset + 8, last_used_at)


def write_checksum(buffer: memoryview, offset: int, checksum: int) -> None:
    _U32.pack_into(buffer, offset + 4, checksum)
    buffer[offset + 1] = 1


def read_marks(buffer: memoryview, offset: int) -> EntryMarks:
    state, has_checksum, checksum, last_used_at = _ENTRY_MARKS.unpack_from(buffer, offset)
    return EntryMarks(state, checksum if has_checksum else None, last_used_at)


def read_entry(buffer: memoryview, offset: int) -> EntryRecord | None:
    """Return the record at `offset`, whatever its state; None if damaged or never written."""
    body = bytes(buffer[offset + _BODY_AT : offset + _BODY_AT + _ENTRY_BODY.size])
    if _CRC.unpack_from(buffer, offset + _BODY_CRC_AT)[0] != zlib.crc32(body):
        return None
    (
        num_blocks, writer_slot, dtype, memory, rows, width, num_bytes, generation, reservation_id,
        requester_lease, origin_seq, reserved_at, mm_hash, namespace, tenant,
    ) = _ENTRY_BODY.unpack(body)  # fmt: skip
    if num_blocks == 0 or dtype >= len(DTYPES) or memory >= len(MEMORIES):
        return None
    return EntryRecord(
        num_blocks, writer_slot, DTYPES[dtype], (rows, width), num_bytes, generation, reservation_id,
        requester_lease, origin_seq, reserved_at, mm_hash.hex(),
        namespace.rstrip(b"\0").decode(), tenant.rstrip(b"\0").decode(), MEMORIES[memory],
    )  # fmt: skip


def read_identity(header: memoryview) -> tuple[int, str, int, int] | None:
    """Return only state, mm_hash, generation and bytes of an entry; None if damaged."""
    body = bytes(header[_BODY_AT : _BODY_AT + _ENTRY_BODY.size])
    if _CRC.unpack_from(header, _BODY_CRC_AT)[0] != zlib.crc32(body):
        return None
    *_, num_bytes, generation, _, _, _, _, mm_hash, _, _ = _ENTRY_BODY.unpack(body)
    return header[0], mm_hash.hex(), generation, num_bytes


def entry_offset(layout: RegionLayout, block: int) -> int:
    return layout.entries_offset + block * ENTRY_HEADER_BYTES
