"""Item table: what PD's engine holds of each media item, and who needs it. Pure bookkeeping.

    None --acquire--> WATCHING --pinned--> PINNED --load--> RESIDENT
                          |                  |                 |
                          `----------------- last holder released -----------------> None

    vLLM's encoder cache was emptied: RESIDENT --forget_views--> WATCHING, and the store is asked anew

WATCHING: the store was asked, the tensor is not there yet. PINNED: the store keeps it for us.
RESIDENT: the worker holds a view in vLLM's encoder cache; the pin is the worker's to end, when the
view is gone. A holder is a vLLM request that was granted the item and is not done with it. An item
may be scheduled only while it is PINNED or RESIDENT.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from triptych_common.domain.errors import IllegalTransitionError
from triptych_common.protocol.store import Descriptor


class ItemState(Enum):
    WATCHING = auto()
    PINNED = auto()
    RESIDENT = auto()


ALLOWED: dict[ItemState, frozenset[ItemState]] = {
    ItemState.WATCHING: frozenset({ItemState.PINNED}),
    ItemState.PINNED: frozenset({ItemState.RESIDENT}),
    ItemState.RESIDENT: frozenset({ItemState.WATCHING}),
}


@dataclass
class Item:
    mm_hash: str
    holders: dict[str, None] = field(default_factory=dict)  # engine request ids, first come first
    state: ItemState = ItemState.WATCHING
    pin_id: int | None = None
    descriptor: Descriptor | None = None
    ordered_by: str | None = None  # the holder in whose name a gateway was asked to have it encoded


@dataclass(frozen=True)
class LoadOrder:
    """Scheduler -> worker: put this pinned tensor into vLLM's encoder cache; the pin becomes yours."""

    mm_hash: str
    pin_id: int
    descriptor: Descriptor
    traceparent: str | None = None


class ItemTable:
    """Owns the items' states; asks nobody. The caller turns each answer into a store command."""

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}

    def __len__(self) -> int:
        return len(self._items)

    def count(self, state: ItemState) -> int:
        return sum(1 for item in self._items.values() if item.state is state)

    def holders(self, mm_hash: str) -> tuple[str, ...]:
        """In the order they came."""
        item = self._items.get(mm_hash)
        return tuple(item.holders) if item else ()

    def state(self, mm_hash: str) -> ItemState | None:
        item = self._items.get(mm_hash)
        return None if item is None else item.state

    def is_ready(self, mm_hash: str) -> bool:
        """May a step that needs this item be scheduled?"""
        return self.state(mm_hash) in (ItemState.PINNED, ItemState.RESIDENT)

    def num_rows(self, mm_hash: str) -> int | None:
        """Rows of the tensor, once it is known."""
        item = self._items.get(mm_hash)
        return item.descriptor.spec.shape[0] if item is not None and item.descriptor is not None else None

    def acquire(self, mm_hash: str, holder: str) -> bool:
        """Add a holder. True: the item is new, ask the store for it."""
        item = self._items.get(mm_hash)
        is_new = item is None
        if item is None:
            item = self._items[mm_hash] = Item(mm_hash)
        item.holders[holder] = None
        return is_new

    def ordered(self, mm_hash: str, holder: str) -> None:
        """A gateway was asked for the item, in the name of `holder`."""
        self._items[mm_hash].ordered_by = holder

    def ordered_hashes(self) -> list[str]:
        """Items that are awaited, and that a gateway was asked for."""
        return [
            item.mm_hash
            for item in self._items.values()
            if item.state is ItemState.WATCHING and item.ordered_by is not None
        ]

    def pinned(self, mm_hash: str, pin_id: int, descriptor: Descriptor) -> bool:
        """The store pinned it for us. False: nobody needs it any more, give the pin back."""
        item = self._items.get(mm_hash)
        if item is None or item.state is not ItemState.WATCHING:
            return False
        item.pin_id, item.descriptor = pin_id, descriptor
        _transition(item, ItemState.PINNED)
        return True

    def load(self, mm_hash: str, traceparent: str | None = None) -> LoadOrder:
        """vLLM allocated cache space: hand the pin to the worker.

        Raises:
            IllegalTransitionError: the item is not pinned.
        """
        item = self._items.get(mm_hash)
        if item is None or item.pin_id is None or item.descriptor is None:
            raise IllegalTransitionError(mm_hash, "absent" if item is None else item.state.name, "RESIDENT")
        _transition(item, ItemState.RESIDENT)
        return LoadOrder(mm_hash, item.pin_id, item.descriptor, traceparent)

    def release(self, mm_hash: str, holder: str) -> Item | None:
        """Drop a holder. Returns the item when that was the last one: it is gone from the table."""
        item = self._items.get(mm_hash)
        if item is None or holder not in item.holders:
            return None
        del item.holders[holder]
        if item.holders:
            return None
        return self._items.pop(mm_hash)

    def take_orphaned_order(self, mm_hash: str) -> bool:
        """Has the holder in whose name the item was ordered left it, while others wait? Said once."""
        item = self._items.get(mm_hash)
        if item is None or item.state is not ItemState.WATCHING or item.ordered_by in (None, *item.holders):
            return False
        item.ordered_by = None
        return True

    def lose_watched(self, mm_hash: str) -> Item | None:
        """It will not come: forget it, so that who needs it later asks anew. None: it is not awaited."""
        return self._items.pop(mm_hash) if self.state(mm_hash) is ItemState.WATCHING else None

    def forget_views(self) -> list[str]:
        """The worker dropped every tensor: who holds one waits for it again. Ask the store for them."""
        forgotten = [item for item in self._items.values() if item.state is ItemState.RESIDENT]
        for item in forgotten:
            _transition(item, ItemState.WATCHING)
            item.pin_id = item.descriptor = None
        return [item.mm_hash for item in forgotten]

    def lose_unloaded(self) -> list[Item]:
        """The store is gone: forget every item that no worker holds, and say which they were."""
        lost = [item for item in self._items.values() if item.state is not ItemState.RESIDENT]
        for item in lost:
            del self._items[item.mm_hash]
        return lost


def _transition(item: Item, to: ItemState) -> None:
    """Move `item` to `to`. Nothing else assigns `item.state`."""
    if to not in ALLOWED[item.state]:
        raise IllegalTransitionError(item.mm_hash, item.state.name, to.name)
    item.state = to
