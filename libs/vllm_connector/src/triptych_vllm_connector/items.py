"""Item table: what PD's engine holds of each media item, and who needs it. Pure bookkeeping.

    None --acquire--> WATCHING --pinned--> PINNED --load--> RESIDENT
                          |                  |                 |
                          `----------------- last holder released -----------------> None

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
    ItemState.RESIDENT: frozenset(),
}


@dataclass
class Item:
    mm_hash: str
    holders: set[str] = field(default_factory=set)  # engine request ids
    state: ItemState = ItemState.WATCHING
    pin_id: int | None = None
    descriptor: Descriptor | None = None


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

    def holders(self, mm_hash: str) -> frozenset[str]:
        item = self._items.get(mm_hash)
        return frozenset(item.holders) if item else frozenset()

    def is_ready(self, mm_hash: str) -> bool:
        """May a step that needs this item be scheduled?"""
        item = self._items.get(mm_hash)
        return item is not None and item.state is not ItemState.WATCHING

    def is_pinned(self, mm_hash: str) -> bool:
        """Must a step that needs this item load it first?"""
        item = self._items.get(mm_hash)
        return item is not None and item.state is ItemState.PINNED

    def acquire(self, mm_hash: str, holder: str) -> bool:
        """Add a holder. True: the item is new, ask the store for it."""
        item = self._items.get(mm_hash)
        if item is None:
            item = self._items[mm_hash] = Item(mm_hash)
        item.holders.add(holder)
        return len(item.holders) == 1 and item.state is ItemState.WATCHING

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
        item.holders.discard(holder)
        if item.holders:
            return None
        return self._items.pop(mm_hash)

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
