"""What always holds for the consumer in its world."""

from tests.support.vllm_connector.consumer_neighbours import SenderModel, StoreModel
from tests.support.vllm_connector.fake_engine import mm_hash
from tests.support.vllm_connector.scheduled import Scheduled
from triptych_common.protocol.messages import EncodeNeeded, EncoderCacheMetadata
from triptych_common.protocol.store import EntrySealed, Pinned, WriterLost
from triptych_vllm_connector.consumer.consumer import (
    BusChanged,
    Consumer,
    Inbox,
    InboxEvent,
    PinReply,
    StoreLost,
)
from triptych_vllm_connector.consumer.item_pins import EngineItemState
from triptych_vllm_connector.consumer.preallocator import Preallocator

ROWS = {mm_hash(index): rows for index, rows in enumerate((2, 3, 5, 7))}  # the items there are
HASHES = sorted(ROWS)


class Running(Scheduled):
    """One request in vLLM's hands."""

    @property
    def request_id(self) -> str:
        params = self.request.ec_transfer_params
        return self.request.request_id if params is None else str(params["request_id"])


class ConsumerChecks:
    """The part of `World` that knows right from wrong."""

    store: StoreModel
    sender: SenderModel
    budget: int | None
    preallocator: Preallocator
    consumer: Consumer
    inbox: Inbox
    live: dict[str, Running]
    parked: set[str]
    worker: dict[str, int | None]
    orders: set[tuple[str, str]]

    # ---- what always holds -----------------------------------------------------------------------
    def check_space(self) -> None:
        held = {item for item in HASHES if self.consumer._pins.requests_of(item)}
        for engine_request_id in self.live:
            admission = self.consumer._requests.get(engine_request_id)
            if admission is not None and admission.is_local:
                held |= {admission.features[place].mm_hash for place in admission.granted}
        assert self.preallocator.num_embeds_used == sum(ROWS[item] for item in held)
        assert self.budget is None or self.preallocator.num_embeds_used <= self.budget

    def check_pins(self) -> None:
        """Every pin has one owner: a message under way, the item table, a load order, or the worker."""
        if self.store.is_lost:
            return
        owners = [pin for event in self._events_not_handled() if (pin := _pin_of(event)) is not None]
        owners += [int(argument) for command, argument in self.store.commands if command == "unpin"]
        owners += [
            item.pin_id
            for item in self.consumer._pins._items.values()
            if item.state is EngineItemState.PINNED and item.pin_id is not None
        ]
        owners += [order.pin_id for order in self.consumer._pins._loads]
        owners += [pin for pin in self.worker.values() if pin is not None]
        assert sorted(owners) == sorted(self.store.pins)

    def check_no_request_is_lost(self) -> None:
        """A parked request waits for space, or for an item that can still come, or is about to be woken."""
        woken = set(self.consumer._requests._to_wake)
        for engine_request_id in self.parked - woken:
            admission = self.consumer._requests[engine_request_id]
            items = {admission.features[place].mm_hash for place in admission.granted}
            assert not admission.is_local or self.preallocator.is_pending(engine_request_id), (
                "parked for nothing"
            )
            waits = [
                item
                for item in items
                if not admission.is_local and self.consumer._pins.state_of(item) is EngineItemState.WATCHING
            ]
            assert waits or self.preallocator.is_pending(engine_request_id), "parked for nothing"
            for item in waits:
                assert self._can_come(item), "parked for an item that no encoder makes"

    def _can_come(self, item: str) -> bool:
        about_it = [event for event in self._events_not_handled() if _item_of(event) in (item, "all")]
        is_asked = ("pin_or_watch", item) in self.store.commands
        is_watched = item in self.store.watches
        is_made = item in self.store.writing or any(order[1] == item for order in self._live_orders())
        is_wanted = any(message.mm_hash == item for message in self._live_needs())
        return bool(about_it) or is_asked or (is_watched and (is_made or is_wanted))

    def _events_not_handled(self) -> list[InboxEvent]:
        return [*self.store.to_engine, *self.inbox._events]

    def _live_orders(self) -> set[tuple[str, str]]:
        request_ids = {each.request_id for each in self.live.values()}
        return {order for order in self.orders if order[0] in request_ids}

    def _live_needs(self) -> list[EncodeNeeded]:
        request_ids = {each.request_id for each in self.live.values()}
        return [message for message in self.sender.needs if message.request_id in request_ids]


def _item_of(event: InboxEvent) -> str | None:
    match event:
        case PinReply() | WriterLost():
            return event.mm_hash
        case EntrySealed():
            return event.descriptor.mm_hash
        case StoreLost():
            return "all"
        case EncoderCacheMetadata() | BusChanged():
            return None


def _pin_of(event: InboxEvent) -> int | None:
    match event:
        case EntrySealed():
            return event.pin_id
        case PinReply(reply=Pinned() as reply):
            return reply.pin_id
        case _:
            return None
