"""A consumer of which a test plays all of the surroundings: vLLM's scheduler, the store, the bus."""

from typing import Any

from tests.support.vllm_connector.fake_engine import (
    INSTANCE,
    FakeMessageSender,
    FakePinLink,
    FakeRequest,
    mm_hash,
)
from triptych_vllm_connector.consumer.consumer import Consumer, Inbox, PinReply
from triptych_vllm_connector.consumer.item_pins import EngineItemState
from triptych_vllm_connector.consumer.preallocator import make_preallocator

A, B, C = mm_hash("a"), mm_hash("b"), mm_hash("c")
IDLE = dict.fromkeys(("requests", "watching", "pinned", "resident", "pending", "preallocated_embeds"), 0)


class Engine:
    """A consumer and what surrounds it: this is vLLM's encoder cache too. `evicted` is what it dropped.

    Args:
        options: more of the consumer's.
    """

    def __init__(self, budget: int = 100, strategy: str = "sync", **options: Any) -> None:
        self.pins, self.sender, self.inbox = FakePinLink(), FakeMessageSender(), Inbox()
        self.now_s = 100.0
        self.evicted: list[str] = []
        self.num_wakes = 0
        self.in_use: set[tuple[str, int]] = set()
        self.consumer = Consumer(
            INSTANCE,
            self.pins,
            self.sender,
            make_preallocator(strategy, budget),
            self,
            self.inbox,
            now_ns=lambda: 0,
            now=lambda: self.now_s,
            **options,
        )
        self.consumer.attach_waker(self._wake)

    def evict_item(self, mm_hash: str) -> None:
        self.evicted.append(mm_hash)

    def is_in_use(self, engine_request_id: str, item_index: int) -> bool:
        return (engine_request_id, item_index) in self.in_use

    def _wake(self) -> None:
        self.num_wakes += 1

    def receives(self, *events: Any) -> list[str]:
        for each in events:
            self.inbox.post_event(each)
        return self.consumer.drain_inbox()

    def replies(self, identifier: str, reply: Any) -> list[str]:
        return self.receives(PinReply(identifier, reply))

    def loads(self, request: FakeRequest, *identifiers: str) -> list[int]:
        """One step that schedules these items; the pins that went to the worker."""
        for identifier in identifiers:
            assert self.consumer.item_state(identifier) is EngineItemState.PINNED
            self.consumer.load_item(request.request_id, identifier)
        return [order.pin_id for order in self.consumer.take_loads()]

    def finish(self, request: FakeRequest, num_computed_tokens: int = 1000) -> None:
        self.consumer.on_finished(request, num_computed_tokens)
