"""The fence in front of every view: a descriptor counts only while the region's own header agrees with it."""

from triptych_common.domain.errors import StoreError
from triptych_common.protocol.store import Descriptor
from triptych_common.region import records
from triptych_common.region.layout import ENTRY_HEADER_BYTES
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
    layout = mapping.layout
    if layout is None:  # a plain file, without headers
        return
    block, rest = divmod(descriptor.offset - layout.data_offset, layout.block_num_bytes)
    if rest or not 0 <= block < layout.num_blocks:
        raise ValueError(f"offset {descriptor.offset} is not the start of a block")
    header = mapping.view(records.entry_offset(layout, block), ENTRY_HEADER_BYTES)
    wanted = (records.READY, descriptor.mm_hash, descriptor.generation, descriptor.spec.num_bytes)
    if records.read_identity(header) != wanted:
        raise StaleDescriptorError(descriptor)
