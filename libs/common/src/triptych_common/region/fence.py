"""Fence before every view and write: both are valid only while the region's header agrees.

A restarted store, or an ended reservation, leaves orders and descriptors whose blocks belong to another
entry.
"""

from typing import Protocol

from triptych_common.domain.errors import StoreError
from triptych_common.protocol.store import Descriptor
from triptych_common.region import records
from triptych_common.region.layout import ENTRY_HEADER_BYTES
from triptych_common.region.mapping import RegionMapping

_NOTHING = (0, "", 0, 0)


class StaleDescriptorError(StoreError):
    """The descriptor is of an entry that is no longer there, e.g. from before a restart. Pin again."""

    def __init__(self, descriptor: Descriptor) -> None:
        super().__init__("stale_descriptor", f"no sealed entry {descriptor.mm_hash} at {descriptor.offset}")


class StaleReservationError(StoreError):
    """The order's reservation has ended, so its blocks may be another's. Nothing was written."""

    def __init__(self, order: "Place") -> None:
        super().__init__(
            "stale_reservation",
            f"no reservation of generation {order.generation} for {order.mm_hash} at {order.offset}",
        )


class Place(Protocol):
    """Place of a reservation, in an order to a worker."""

    @property
    def mm_hash(self) -> str: ...

    @property
    def generation(self) -> int: ...

    @property
    def offset(self) -> int: ...


def check_reservation(mapping: RegionMapping, order: Place, num_bytes: int) -> None:
    """Check that blocks for `num_bytes` of the item are reserved at the order's place and generation.

    Raises:
        StaleReservationError: they are not.
        ValueError: the order points outside the region.
    """
    wanted = (records.WRITING, order.mm_hash, order.generation, num_bytes)
    if (identity := _identity_at(mapping, order.offset)) is not None and identity != wanted:
        raise StaleReservationError(order)


def check_descriptor(mapping: RegionMapping, descriptor: Descriptor) -> None:
    """Check that the descriptor's entry is sealed in its place and generation.

    Raises:
        StaleDescriptorError: it is not.
        ValueError: the descriptor points outside the region.
    """
    wanted = (records.READY, descriptor.mm_hash, descriptor.generation, descriptor.spec.num_bytes)
    if (identity := _identity_at(mapping, descriptor.offset)) is not None and identity != wanted:
        raise StaleDescriptorError(descriptor)


def _identity_at(mapping: RegionMapping, offset: int) -> tuple[int, str, int, int] | None:
    """Return state, mm_hash, generation and bytes in the header of the block at `offset`.

    None: a plain file, without headers. A damaged header is of nothing.
    """
    layout = mapping.layout
    if layout is None:
        return None
    block, rest = divmod(offset - layout.data_offset, layout.block_num_bytes)
    if rest or not 0 <= block < layout.num_blocks:
        raise ValueError(f"offset {offset} is not the start of a block")
    header = mapping.view(records.entry_offset(layout, block), ENTRY_HEADER_BYTES)
    return records.read_identity(header) or _NOTHING
