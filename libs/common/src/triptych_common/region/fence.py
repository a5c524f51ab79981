"""The fence in front of every view: a descriptor counts only while the region's own header agrees with it."""

from triptych_common.domain.errors import StoreError
from triptych_common.protocol.store import Descriptor
from triptych_common.region import records
from triptych_common.region.layout import RegionLayout
from triptych_common.region.mapping import RegionMapping


class StaleDescriptorError(StoreError):
    """The descriptor is of an entry that is no longer there, e.g. from before a restart. Pin again."""

    def __init__(self, descriptor: Descriptor) -> None:
        super().__init__("stale_descriptor", f"no sealed entry {descriptor.mm_hash} at {descriptor.offset}")


def check_descriptor(mapping: RegionMapping, descriptor: Descriptor) -> None:
    """Nothing, if the entry is sealed where the descriptor says, and of its generation.

    Raises:
        StaleDescriptorError: it is not.
        ValueError: the descriptor points outside the region.
    """
    layout = _layout_of(mapping)
    if layout is None:  # a plain file, without headers
        return
    block, rest = divmod(descriptor.offset - layout.data_offset, layout.block_num_bytes)
    if rest or not 0 <= block < layout.num_blocks:
        raise ValueError(f"offset {descriptor.offset} is not the start of a block")
    offset = records.entry_offset(layout, block)
    header = mapping.view(0, layout.data_offset)
    entry = records.read_entry(header, offset)
    if (
        entry is None
        or records.read_marks(header, offset).state != records.READY
        or (entry.mm_hash, entry.generation) != (descriptor.mm_hash, descriptor.generation)
        or entry.num_bytes != descriptor.spec.num_bytes
    ):
        raise StaleDescriptorError(descriptor)


def _layout_of(mapping: RegionMapping) -> RegionLayout | None:
    header = records.read_region_header(mapping.view(0, records.REGION_HEADER_NUM_BYTES))
    return None if header is None else header.layout
