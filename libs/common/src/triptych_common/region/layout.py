"""Layout of the region file: places of headers and blocks.

    offset 0                                             bytes
    ├ region header   what this file is                  4096
    ├ client slots    one per session, name and lease    num_client_slots × 512
    ├ pin records     one per pin                        num_pin_records × 32
    ├ entry headers   one per block; the one of an       num_blocks × 256
    │                 entry's first block describes it
    └ blocks          aligned to the block size          num_blocks × block_num_bytes

Only the store writes the headers. They let a restarted store take up what its clients still use
(`records` has their formats); clients read them to refuse a descriptor that is out of date.
"""

from dataclasses import dataclass

from triptych_common.domain.errors import TriptychError

PAGE_BYTES = 4096
REGION_HEADER_BYTES = 4096
CLIENT_SLOT_BYTES = 512
PIN_RECORD_BYTES = 32
ENTRY_HEADER_BYTES = 256
NUM_CLIENT_SLOTS = 512
MIN_PIN_RECORDS = 1024
PIN_RECORDS_PER_BLOCK = 2


class RegionLayoutError(TriptychError):
    """The region file cannot be used: too small, not a region, of another version, or damaged."""


@dataclass(frozen=True)
class RegionLayout:
    """Offsets and sizes of one region, in bytes unless named otherwise."""

    block_num_bytes: int
    num_blocks: int
    num_pin_records: int
    num_client_slots: int = NUM_CLIENT_SLOTS

    @classmethod
    def fit(cls, region_num_bytes: int, block_num_bytes: int) -> "RegionLayout":
        """Return the layout with as many blocks as `region_num_bytes` hold, headers included.

        Raises:
            RegionLayoutError: no room for a single block, or a block size that is not a multiple of a page.
        """
        if block_num_bytes < PAGE_BYTES or block_num_bytes % PAGE_BYTES:
            raise RegionLayoutError(f"block size {block_num_bytes} is not a multiple of {PAGE_BYTES} bytes")
        per_block = block_num_bytes + ENTRY_HEADER_BYTES + PIN_RECORDS_PER_BLOCK * PIN_RECORD_BYTES
        num_blocks = region_num_bytes // per_block
        while num_blocks > 0:
            layout = cls(
                block_num_bytes, num_blocks, max(MIN_PIN_RECORDS, PIN_RECORDS_PER_BLOCK * num_blocks)
            )
            excess = layout.num_bytes - region_num_bytes
            if excess <= 0:
                return layout
            num_blocks -= max(1, excess // per_block)
        raise RegionLayoutError(f"{region_num_bytes} bytes have no room for blocks of {block_num_bytes}")

    @property
    def slots_offset(self) -> int:
        return REGION_HEADER_BYTES

    @property
    def pins_offset(self) -> int:
        return self.slots_offset + self.num_client_slots * CLIENT_SLOT_BYTES

    @property
    def entries_offset(self) -> int:
        return self.pins_offset + self.num_pin_records * PIN_RECORD_BYTES

    @property
    def data_offset(self) -> int:
        """Offset of block 0 in the file."""
        headers = self.entries_offset + self.num_blocks * ENTRY_HEADER_BYTES
        return -(-headers // self.block_num_bytes) * self.block_num_bytes

    @property
    def data_num_bytes(self) -> int:
        return self.num_blocks * self.block_num_bytes

    @property
    def num_bytes(self) -> int:
        return self.data_offset + self.data_num_bytes

    def offset_of(self, block: int) -> int:
        return self.data_offset + block * self.block_num_bytes

    def num_blocks_for(self, num_bytes: int) -> int:
        return -(-num_bytes // self.block_num_bytes)
