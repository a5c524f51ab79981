"""ItemPins: the item table with the store at its one end and vLLM's encoder cache at the other.

Every pin that the store gives ends once: given back from here, or handed to the worker by a `LoadOrder`.
"""

from collections.abc import Callable

from triptych_common.protocol.store import Descriptor
from triptych_vllm_connector.consumer.item_table import Item, ItemState, ItemTable, LoadOrder
from triptych_vllm_connector.links.links import PinLink


class ItemPins:
    """Turns what requests need, and no longer need, into commands to the store and orders to the worker."""

    def __init__(self, pins: PinLink) -> None:
        self._pins = pins
        self.items = ItemTable()
        self._loads: list[LoadOrder] = []
        self._evict: Callable[[str], None] = lambda mm_hash: None

    def bind(self, evict: Callable[[str], None]) -> None:
        """`evict(mm_hash)` makes vLLM drop the item from its encoder cache."""
        self._evict = evict

    def acquire(self, mm_hash: str, engine_id: str) -> None:
        """A request was granted the item."""
        if self.items.acquire(mm_hash, engine_id):
            self._pins.pin_or_watch(mm_hash)

    def pinned(self, mm_hash: str, pin_id: int, descriptor: Descriptor) -> bool:
        """The store pinned the item. False: not needed any more, the pin was given back."""
        if self.items.pinned(mm_hash, pin_id, descriptor):
            return True
        self._pins.unpin(pin_id)
        return False

    def give_back(self, pin_id: int) -> None:
        """A pin of a tensor that cannot be used."""
        self._pins.unpin(pin_id)

    def load(self, mm_hash: str, traceparent: str | None) -> None:
        """vLLM gave the item space in its cache.

        Raises:
            IllegalTransitionError: the item is not pinned.
        """
        self._loads.append(self.items.load(mm_hash, traceparent))

    def take_loads(self) -> list[LoadOrder]:
        """The orders of this step."""
        loads, self._loads = self._loads, []
        return loads

    def release(self, mm_hash: str, engine_id: str) -> None:
        """A request is done with the item."""
        item = self.items.release(mm_hash, engine_id)
        if item is not None:
            self._end(item)
        elif self.items.take_orphaned_order(mm_hash):
            self._pins.pin_or_watch(mm_hash)  # its gateway forgets the order: if nobody writes, order again

    def ask_again(self) -> None:
        """What a gateway was asked to order may be lost: if nobody writes it, it is ordered again."""
        for mm_hash in self.items.ordered_hashes():
            self._pins.pin_or_watch(mm_hash)

    def forget_views(self) -> None:
        """vLLM emptied its encoder cache: the pins of the views end with them, and new ones are needed."""
        for mm_hash in self.items.forget_views():
            self._withdraw_load(mm_hash)
            self._pins.pin_or_watch(mm_hash)

    def unwatch(self, mm_hash: str) -> None:
        """A watch that nobody needs."""
        self._pins.unwatch(mm_hash)

    def lose_watched(self, mm_hash: str) -> Item | None:
        """The item will not come. None: it is not awaited, or came meanwhile."""
        item = self.items.lose_watched(mm_hash)
        if item is not None:
            self._pins.unwatch(mm_hash)
        return item

    def _end(self, item: Item) -> None:
        """Nobody needs it any more."""
        if item.state is ItemState.WATCHING:
            self._pins.unwatch(item.mm_hash)
        elif item.state is ItemState.PINNED and item.pin_id is not None:
            self._pins.unpin(item.pin_id)
        else:
            self._withdraw_load(item.mm_hash)
            self._evict(item.mm_hash)

    def _withdraw_load(self, mm_hash: str) -> None:
        """A request that was scheduled and preempted in one pass: no worker will see the load."""
        for order in [order for order in self._loads if order.mm_hash == mm_hash]:
            self._loads.remove(order)
            self._pins.unpin(order.pin_id)
