"""Item pins: what prefill_decode's engine holds of each media item, and which requests need it.

    None --acquire--> WATCHING --pinned--> PINNED --load--> RESIDENT
                          |                  |                 |
                          `------------- last request released it --------> None

    vLLM's encoder cache was emptied: RESIDENT --forget_views--> WATCHING, and the store is asked anew

WATCHING: the store was asked, the tensor is not there yet. PINNED: the store keeps it for this engine.
RESIDENT: the worker holds a view in vLLM's encoder cache; the pin is the worker's to end, when the view is
gone. An item may be scheduled only while it is PINNED or RESIDENT.

Every pin that the store gives ends once: given back from here, or handed to the worker by a `LoadOrder`.

A PINNED item of the region that no step loads yet, because its request waits for others, is named to the
workers once: a GPU copies it ahead. The pin stays here until the `LoadOrder`.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from triptych_common.domain.errors import IllegalTransitionError
from triptych_common.domain.transitions import check_transition
from triptych_common.protocol.store import SHM, Descriptor
from triptych_vllm_connector.consumer.ports import EncoderCache, PinLink
from triptych_vllm_connector.step_orders import LoadOrder


class EngineItemState(Enum):
    WATCHING = auto()
    PINNED = auto()
    RESIDENT = auto()


ALLOWED: dict[EngineItemState, frozenset[EngineItemState]] = {
    EngineItemState.WATCHING: frozenset({EngineItemState.PINNED}),
    EngineItemState.PINNED: frozenset({EngineItemState.RESIDENT}),
    EngineItemState.RESIDENT: frozenset({EngineItemState.WATCHING}),
}


@dataclass
class EngineItem:
    """One item that requests were granted and still need."""

    mm_hash: str
    needed_by: dict[str, None] = field(default_factory=dict)  # engine request ids, first come first
    state: EngineItemState = EngineItemState.WATCHING
    pin_id: int | None = None
    descriptor: Descriptor | None = None
    is_started: bool = False  # workers have been told to copy it ahead
    ordered_by: str | None = None  # the request in whose name a gateway was asked to have it encoded


def move_item(item: EngineItem, to: EngineItemState) -> None:
    """Move `item` to `to`; nothing else assigns `item.state`.

    Raises:
        IllegalTransitionError: `to` cannot follow its state.
    """
    check_transition(ALLOWED, item.mm_hash, item.state, to)
    item.state = to


class ItemPins:
    """Owns the items; turns what requests need into store commands and load orders."""

    def __init__(self, link: PinLink, cache: EncoderCache) -> None:
        self._link = link
        self._cache = cache
        self._items: dict[str, EngineItem] = {}
        self._loads: list[LoadOrder] = []
        self._early: dict[str, None] = {}  # pinned since the last step
        self._dropped: list[str] = []  # started, and not to be loaded

    # ---- questions -------------------------------------------------------------------------------
    def count_items(self, state: EngineItemState) -> int:
        return sum(1 for item in self._items.values() if item.state is state)

    def state_of(self, mm_hash: str) -> EngineItemState | None:
        item = self._items.get(mm_hash)
        return None if item is None else item.state

    def is_item_ready(self, mm_hash: str) -> bool:
        """True if a step that needs this item may be scheduled."""
        return self.state_of(mm_hash) in (EngineItemState.PINNED, EngineItemState.RESIDENT)

    def requests_of(self, mm_hash: str) -> tuple[str, ...]:
        """Engine request ids of the item, in order of arrival."""
        item = self._items.get(mm_hash)
        return tuple(item.needed_by) if item else ()

    def num_rows_of(self, mm_hash: str) -> int | None:
        """Number of the tensor's rows, once known."""
        item = self._items.get(mm_hash)
        return item.descriptor.spec.shape[0] if item is not None and item.descriptor is not None else None

    # ---- requests --------------------------------------------------------------------------------
    def acquire_item(self, mm_hash: str, engine_request_id: str) -> None:
        item = self._items.get(mm_hash)
        if item is None:
            item = self._items[mm_hash] = EngineItem(mm_hash)
            self._link.pin_or_watch(mm_hash)
        item.needed_by[engine_request_id] = None

    def release_item(self, mm_hash: str, engine_request_id: str) -> None:
        """Remove a request that is done with the item; the last one ends it."""
        item = self._items.get(mm_hash)
        if item is None or engine_request_id not in item.needed_by:
            return
        del item.needed_by[engine_request_id]
        if not item.needed_by:
            del self._items[mm_hash]
            self._end_item(item)
        elif item.state is EngineItemState.WATCHING and item.ordered_by not in (None, *item.needed_by):
            item.ordered_by = None
            self._link.pin_or_watch(
                mm_hash
            )  # its gateway forgets the order: if no encoder writes, order again

    def note_order(self, mm_hash: str, engine_request_id: str) -> None:
        """Record that a gateway was asked for the item on behalf of this request."""
        self._items[mm_hash].ordered_by = engine_request_id

    # ---- the store -------------------------------------------------------------------------------
    def keep_pin(self, mm_hash: str, pin_id: int, descriptor: Descriptor) -> bool:
        """Keep the store's pin; False if no request needs the item, and the pin was given back."""
        item = self._items.get(mm_hash)
        if item is None or item.state is not EngineItemState.WATCHING:
            self._link.unpin(pin_id)
            return False
        move_item(item, EngineItemState.PINNED)
        item.pin_id, item.descriptor, item.is_started = pin_id, descriptor, False
        if descriptor.memory == SHM:
            self._early[mm_hash] = None
        return True

    def refuse_pin(self, pin_id: int) -> None:
        """Give back the pin of an unusable tensor."""
        self._link.unpin(pin_id)

    def end_watch(self, mm_hash: str) -> None:
        self._link.unwatch(mm_hash)

    def ask_for_ordered(self) -> None:
        """Ask the store again for items ordered from gateways: an order may be lost, and is repeated if no
        encoder writes the item."""
        for item in self._items.values():
            if item.state is EngineItemState.WATCHING and item.ordered_by is not None:
                self._link.pin_or_watch(item.mm_hash)

    def lose_watched(self, mm_hash: str) -> EngineItem | None:
        """Forget an item that will not come, so that later requests ask anew; None if it was not awaited."""
        if self.state_of(mm_hash) is not EngineItemState.WATCHING:
            return None
        self._link.unwatch(mm_hash)
        return self._items.pop(mm_hash)

    def lose_unloaded(self) -> list[EngineItem]:
        """Forget and return every item that no worker holds, because the store is gone."""
        lost = [item for item in self._items.values() if item.state is not EngineItemState.RESIDENT]
        for item in lost:
            del self._items[item.mm_hash]
            self._drop_copy(item)
        return lost

    # ---- vLLM's encoder cache --------------------------------------------------------------------
    def order_load(self, mm_hash: str, traceparent: str | None) -> None:
        """Hand the pin to the worker; vLLM has allocated cache space for the item.

        Raises:
            IllegalTransitionError: the item is not pinned.
        """
        item = self._items.get(mm_hash)
        if item is None or item.pin_id is None or item.descriptor is None:
            raise IllegalTransitionError(mm_hash, "absent" if item is None else item.state.name, "RESIDENT")
        move_item(item, EngineItemState.RESIDENT)
        self._loads.append(LoadOrder(mm_hash, item.pin_id, item.descriptor, traceparent))

    def take_load_orders(self) -> list[LoadOrder]:
        loads, self._loads = self._loads, []
        for order in loads:
            if (item := self._items.get(order.mm_hash)) is not None:
                item.is_started = False  # the load takes the copy
        return loads

    def take_starts(self) -> tuple[list[LoadOrder], list[str]]:
        """Take the items that this step does not load and that workers may copy ahead, and those to drop."""
        starts: list[LoadOrder] = []
        for mm_hash in self._early:
            item = self._items.get(mm_hash)
            if item is None or item.state is not EngineItemState.PINNED or item.is_started:
                continue
            if item.pin_id is not None and item.descriptor is not None:
                item.is_started = True
                starts.append(LoadOrder(mm_hash, item.pin_id, item.descriptor))
        self._early.clear()
        drops, self._dropped = self._dropped, []
        return starts, drops

    def _drop_copy(self, item: EngineItem) -> None:
        if item.is_started:
            item.is_started = False
            self._dropped.append(item.mm_hash)

    def forget_views(self) -> None:
        """Ask for new pins, because vLLM emptied its encoder cache and the views' pins end."""
        for item in self._items.values():
            if item.state is EngineItemState.RESIDENT:
                move_item(item, EngineItemState.WATCHING)
                item.pin_id = item.descriptor = None
                self._drop_copy(item)
                self._withdraw_load(item.mm_hash)
                self._link.pin_or_watch(item.mm_hash)

    def _end_item(self, item: EngineItem) -> None:
        if item.state is EngineItemState.WATCHING:
            self._link.unwatch(item.mm_hash)
        elif item.state is EngineItemState.PINNED and item.pin_id is not None:
            self._drop_copy(item)
            self._link.unpin(item.pin_id)
        else:
            self._drop_copy(item)
            self._withdraw_load(item.mm_hash)
            self._cache.evict_item(item.mm_hash)

    def _withdraw_load(self, mm_hash: str) -> None:
        """Withdraw the load of a request that was scheduled and preempted in one pass."""
        for order in [order for order in self._loads if order.mm_hash == mm_hash]:
            self._loads.remove(order)
            self._link.unpin(order.pin_id)
