"""A consumer of which a test plays all of the surroundings: vLLM's scheduler, the store, the bus."""

from typing import Any

from tests.support.fake_engine import INSTANCE, FakePinLink, FakeRequest, FakeTalkLink, mm_hash
from triptych_vllm_connector.consumer.consumer import Consumer
from triptych_vllm_connector.consumer.preallocator import make_preallocator
from triptych_vllm_connector.links.inbox import PinReply

A, B, C = mm_hash("a"), mm_hash("b"), mm_hash("c")
IDLE = dict.fromkeys(("requests", "watching", "pinned", "resident", "pending", "preallocated_embeds"), 0)


class Engine:
    """A consumer and what surrounds it. `evicted` is what vLLM was told to drop."""

    def __init__(self, budget: int = 100, strategy: str = "sync") -> None:
        self.pins, self.talk = FakePinLink(), FakeTalkLink()
        self.evicted: list[str] = []
        self.num_wakes = 0
        self.consumer = Consumer(
            INSTANCE, self.pins, self.talk, make_preallocator(strategy, budget), lambda: 0
        )
        self.in_use: set[tuple[str, int]] = set()
        self.consumer.bind(self.evicted.append, lambda request_id, place: (request_id, place) in self.in_use)
        self.consumer.attach_waker(self._wake)

    def _wake(self) -> None:
        self.num_wakes += 1

    def hears(self, *heard: Any) -> list[str]:
        for each in heard:
            self.consumer.post(each)
        return self.consumer.drain()

    def replies(self, identifier: str, reply: Any) -> list[str]:
        return self.hears(PinReply(identifier, reply))

    def loads(self, request: FakeRequest, *identifiers: str) -> list[int]:
        """One step that schedules these items; the pins that went to the worker."""
        for identifier in identifiers:
            assert self.consumer.must_load(identifier)
            self.consumer.load(request.request_id, identifier)
        return [order.pin_id for order in self.consumer.take_loads()]

    def finish(self, request: FakeRequest, num_computed_tokens: int = 1000) -> None:
        self.consumer.finished(request, num_computed_tokens)
