"""SyncPreallocator against a model: requests come, get space, free it item by item, and leave.

After every step: the rows add up and stay below the budget, whole requests only, none overtakes, and
no request that could be served is forgotten in the queue. At the end all get through.
"""

import copy
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.examples import examples
from triptych_vllm_connector.consumer.preallocator import Need, SyncPreallocator

SIZES = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 8, "f": 10}


def needs_of(names: list[str]) -> list[Need]:
    return [Need(name, SIZES[name], index) for index, name in enumerate(names)]


@dataclass
class Request:
    """Model of one request: places that wait for space, and granted ones, in prompt order."""

    waiting: list[Need]
    granted: list[Need] = field(default_factory=list)

    def holds(self, mm_hash: str) -> bool:
        return any(need.mm_hash == mm_hash for need in self.granted)


class PreallocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.budget = 10
        self.preallocator = SyncPreallocator(self.budget)
        self.requests: dict[str, Request] = {}
        self.queue: list[str] = []
        self.num_requests = 0

    @initialize(budget=st.sampled_from([10, 13, 20]))
    def start(self, budget: int) -> None:
        self.budget = budget
        self.preallocator = SyncPreallocator(budget)

    # ---- what happens ----------------------------------------------------------------------------
    @rule(names=st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=5))
    def comes(self, names: list[str]) -> None:
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        request = self.requests[request_id] = Request(needs_of(names))
        had_queue = bool(self.queue)
        granted = self.preallocator.preallocate(request_id, request.waiting)
        assert not (had_queue and granted), "overtaken"
        self.was_granted(request_id, granted)
        if request.waiting:
            self.queue.append(request_id)

    @precondition(lambda self: any(request.granted for request in self.requests.values()))
    @rule(data=st.data())
    def is_done_with_a_place(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from([name for name, r in self.requests.items() if r.granted]))
        self.advance(request_id)
        self.take()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(sorted(self.requests))))
        self.take()

    @precondition(lambda self: self.queue)
    @rule(data=st.data(), names=st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4))
    def asks_anew(self, data: st.DataObject, names: list[str]) -> None:
        """It keeps its place."""
        request_id = data.draw(st.sampled_from(self.queue))
        request = self.requests[request_id]
        request.waiting = needs_of(names)
        is_head = self.queue[0] == request_id
        granted = self.preallocator.preallocate(request_id, request.waiting)
        assert is_head or not granted
        self.was_granted(request_id, granted)
        if not request.waiting:
            self.queue.remove(request_id)
        self.take()

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def waits_no_more(self, data: st.DataObject) -> None:
        """It keeps what it holds."""
        request_id = data.draw(st.sampled_from(self.queue))
        self.requests[request_id].waiting = []
        self.preallocator.cancel_pending(request_id)
        self.queue.remove(request_id)
        self.take()

    # ---- the model -------------------------------------------------------------------------------
    def was_granted(self, request_id: str, granted: list[Need]) -> None:
        request = self.requests[request_id]
        assert granted == request.waiting[: len(granted)]
        if granted and len(granted) < len(request.waiting):
            assert sum({need.mm_hash: need.num_embeds for need in request.waiting}.values()) > self.budget
            others = [other for name, other in self.requests.items() if name != request_id and other.granted]
            assert not others, "a part, while others hold space"
        request.waiting = request.waiting[len(granted) :]
        request.granted += granted

    def take(self) -> list[str]:
        taken = self.preallocator.take_granted()
        for request_id, granted in taken:
            assert granted
            assert request_id == self.queue[0], "overtaken"
            self.was_granted(request_id, granted)
            if not self.requests[request_id].waiting:
                self.queue.pop(0)
        return [request_id for request_id, _ in taken]

    def advance(self, request_id: str) -> None:
        request = self.requests[request_id]
        need = request.granted.pop(0)
        self.preallocator.finalize_allocation(need.mm_hash)
        if not request.holds(need.mm_hash):
            self.preallocator.deallocate(request_id, need.mm_hash)

    def leave(self, request_id: str) -> None:
        self.preallocator.depreallocate(request_id)
        del self.requests[request_id]
        if request_id in self.queue:
            self.queue.remove(request_id)

    # ---- what always holds -----------------------------------------------------------------------
    @invariant()
    def the_rows_add_up(self) -> None:
        held = {need.mm_hash for request in self.requests.values() for need in request.granted}
        assert self.preallocator.num_embeds_used == sum(SIZES[name] for name in held) <= self.budget

    @invariant()
    def the_queue_is_the_models(self) -> None:
        assert self.preallocator.num_pending == len(self.queue)
        for request_id, request in self.requests.items():
            assert (
                (request_id in self.preallocator._pending)
                == bool(request.waiting)
                == (request_id in self.queue)
            )

    @invariant()
    def whole_requests_but_for_the_first_in_the_queue(self) -> None:
        for request_id, request in self.requests.items():
            if request.granted and request.waiting:
                assert self.queue[0] == request_id

    @invariant()
    def no_request_is_forgotten(self) -> None:
        assert copy.deepcopy(self.preallocator).take_granted() == []

    def teardown(self) -> None:
        """Without newcomers each request gets all its space in turn, and in the end nothing is held."""
        while self.requests:
            working = next((name for name, request in self.requests.items() if request.granted), None)
            if working is not None:
                self.advance(working)
                if not self.requests[working].granted and not self.requests[working].waiting:
                    self.leave(working)
                self.take()
                continue
            idle = [name for name, request in self.requests.items() if not request.waiting]
            for request_id in idle:
                self.leave(request_id)
            assert idle or self.take(), "deadlock"
        assert self.preallocator.num_embeds_used == 0
        assert self.preallocator.num_pending == 0


PreallocatorMachine.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=40)
TestPreallocator = PreallocatorMachine.TestCase
