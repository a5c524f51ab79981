"""Arrivals: what the store says about items, and what it means for the requests that wait for them."""

from typing import Literal

from triptych_common.domain.errors import StoreError
from triptych_common.protocol.store import EntrySealed, Pinned, StoreFailure, StoreReply, Watching
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.consumer.item_grants import Grants
from triptych_vllm_connector.consumer.item_pins import ItemPins
from triptych_vllm_connector.consumer.item_table import Item, ItemState
from triptych_vllm_connector.consumer.preallocator import Preallocator
from triptych_vllm_connector.consumer.request_table import RequestTable
from triptych_vllm_connector.consumer.speech import Speech

log = get_logger(__name__)


class Arrivals:
    """Items that came, that nobody makes, or that will not come."""

    def __init__(
        self,
        requests: RequestTable,
        holdings: ItemPins,
        grants: Grants,
        preallocator: Preallocator,
        speech: Speech,
    ) -> None:
        self._requests = requests
        self._holdings = holdings
        self._items = holdings.items
        self._grants = grants
        self._preallocator = preallocator
        self._speech = speech

    def replied(self, mm_hash: str, reply: StoreReply | StoreError) -> None:
        """The store's answer to `pin_or_watch`."""
        match reply:
            case Pinned():
                self.pinned(mm_hash, reply)
            case Watching():
                self._watching(mm_hash, reply)
            case StoreError():
                self._will_not_come(mm_hash, f"the cache store refused: {reply}")
            case StoreFailure():
                self._will_not_come(mm_hash, f"the cache store refused: {reply.code}")
            case _:
                self._will_not_come(mm_hash, f"the cache store answered {reply.kind!r} to pin_or_watch")

    def pinned(self, mm_hash: str, pinned: Pinned | EntrySealed) -> None:
        """The item is here, if its rows are those that the requests expect."""
        num_embeds = pinned.descriptor.spec.shape[0]
        if any(
            feature.num_embeds != num_embeds
            for engine_id in self._items.holders(mm_hash)
            for feature in self._requests[engine_id].features
            if feature.mm_hash == mm_hash
        ):  # wrong rows would be wrong answers, or the engine's end
            self._holdings.give_back(pinned.pin_id)
            self._will_not_come(
                mm_hash, f"the encoder made {num_embeds} rows, and the request expects others"
            )
            return
        if self._holdings.pinned(mm_hash, pinned.pin_id, pinned.descriptor):
            for engine_id in self._items.holders(mm_hash):
                self._grants.wake_if_ready(self._requests[engine_id])

    def writer_lost(self, mm_hash: str) -> None:
        """Whoever was writing the item went away before the seal."""
        self._order_again(mm_hash, "writer_lost")

    def store_lost(self) -> None:
        """The session ended, and with it every pin that no worker holds."""
        for item in self._items.lose_unloaded():
            self._fail_holders(item, "the cache store went away")
        self._grants.wake_granted()

    def _watching(self, mm_hash: str, reply: Watching) -> None:
        if self._items.state(mm_hash) is not ItemState.WATCHING:
            self._holdings.unwatch(mm_hash)  # asked for by somebody who has left since
        elif not reply.writing:
            self._order_again(mm_hash, "absent")

    def _order_again(self, mm_hash: str, reason: Literal["absent", "writer_lost", "evicted"]) -> None:
        """Nobody makes this item: ask a gateway that still has the media."""
        if self._items.state(mm_hash) is not ItemState.WATCHING:
            return  # nobody needs it any more, or it came meanwhile
        for engine_id in self._items.holders(mm_hash):
            admission = self._requests[engine_id]
            if admission.failure is None and admission.gateway is not None:
                log.info("encode needed", mm_hash=mm_hash, request_id=admission.wire_id, reason=reason)
                self._items.ordered(mm_hash, engine_id)
                self._speech.encode_needed(admission, mm_hash, reason)
                return
        self._will_not_come(mm_hash, "the item is not in the cache store and nobody can encode it")

    def _will_not_come(self, mm_hash: str, why: str) -> None:
        """Fail those that wait for the item. Of one that came meanwhile this is an old story."""
        item = self._holdings.lose_watched(mm_hash)
        if item is not None:
            self._fail_holders(item, why)
            self._grants.wake_granted()

    def _fail_holders(self, item: Item, why: str) -> None:
        """The item is out of the table: they do not hold it any more."""
        for engine_id in item.holders:
            admission = self._requests[engine_id]
            admission.drop_item(item.mm_hash)
            self._preallocator.deallocate(engine_id, item.mm_hash)
            self._requests.fail(admission, why)
