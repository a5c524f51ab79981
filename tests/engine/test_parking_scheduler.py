"""The parking mixin, in front of a stand-in for vLLM's scheduler. No engine is started."""

import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_engine import (
    INSTANCE,
    FakePinLink,
    FakeRequest,
    FakeTalkLink,
    fake_request,
    mm_hash,
    pinned,
)

from triptych_vllm_connector.consumer import Consumer
from triptych_vllm_connector.inbox import PinReply
from triptych_vllm_connector.preallocator import make_preallocator

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.v1.request import RequestStatus

    from triptych_vllm_connector.connector import LostLoads, StepOrders, TriptychECConnector
    from triptych_vllm_connector.encoder_cache_manager import PreallocatingEncoderCacheManager
    from triptych_vllm_connector.scheduler import ParkingMixin

A, B = mm_hash("a"), mm_hash("b")
ROWS = 4
PATIENCE_S = 2.0  # more than what a fake request may wait, and the grace


@dataclass(eq=False)
class Held(FakeRequest):
    """With a state."""

    status: RequestStatus = RequestStatus.WAITING

    def is_finished(self) -> bool:
        return RequestStatus.is_finished(self.status)


class Clock:
    now_s = 0.0


class KvCache:
    """`KVCacheManager` and its block pool: whoever runs has the same blocks."""

    def __init__(self) -> None:
        self.block_pool = self
        self.null_block = SimpleNamespace(block_id=0)
        self.blocks = [SimpleNamespace(block_hash=f"hash-{number}") for number in range(4)]
        self.evicted: set[int] = set()

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        return ([1, 2, 3],)

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted |= block_ids


class Connector(TriptychECConnector):
    """Without a store and a bus."""

    def __init__(self, consumer: Consumer) -> None:
        self.fake_consumer = consumer

    def open_consumer(self, cache_size: int) -> Consumer:
        return self.fake_consumer


class StandIn:
    """vLLM's scheduler, as far as the mixin knows it: one item per step and request."""

    block_size = 4

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.kv_cache_manager = KvCache()
        self._loads: list[Any] = []
        self.ec_connector = Connector(consumer)
        self.encoder_cache_manager = PreallocatingEncoderCacheManager.create_manager(
            cache_size=ROWS, vllm_config=SimpleNamespace()
        )
        self.connector = None
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting = Queue()
        self.deferred_waiting: set[Any] = set()
        self.finished_req_ids: set[str] = set()

    def schedule(self) -> Any:
        self.finished_req_ids.clear()
        scheduled: dict[str, int] = {}
        for request in self.running:
            if self.consumer.admit(request, request.num_computed_tokens):
                scheduled[request.request_id] = self._compute(request)
        for request in list(self.waiting):
            if self._ec_transfer_pending(request, 0):
                continue
            self.waiting.remove(request)
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            scheduled[request.request_id] = self._compute(request)
        for rid in self.consumer.take_failed():  # `update_from_output`
            self.finish_requests([rid], RequestStatus.FINISHED_ERROR)
        orders, self._loads = StepOrders(loads=self._loads), []
        return SimpleNamespace(num_scheduled_tokens=scheduled, ec_connector_metadata=orders)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None:
        pass

    def _preempt_request(self, request: Any) -> None:
        self.running.remove(request)
        self.waiting.prepend_request(request)
        request.num_computed_tokens = 0

    def _compute(self, request: Any) -> int:
        for place, feature in enumerate(request.mm_features):
            position = feature.mm_position
            if position.offset + position.length > request.num_computed_tokens:
                self.consumer.load(request.request_id, feature.identifier)
                self._loads += self.consumer.take_loads()
                request.num_computed_tokens = position.offset + position.length
                self.consumer.computed(request.request_id, place)
                break
        return 1

    def _ec_transfer_pending(self, request: Any, num_computed_tokens: int) -> bool:
        return not self.consumer.admit(request, num_computed_tokens)

    def _holds_kv_blocks(self, request: Any) -> bool:
        return bool(request.num_computed_tokens)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def make_stats(self) -> Any:
        return SimpleNamespace(num_waiting_reqs=len(self.waiting))

    def get_num_unfinished_requests(self) -> int:
        return sum(self.get_request_counts())

    def has_requests(self) -> bool:
        return bool(self.get_num_unfinished_requests() or self.finished_req_ids)

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish_requests(self, request_ids: Any, status: RequestStatus) -> list[Any]:
        finished = [self.requests.pop(rid) for rid in request_ids if rid in self.requests]
        for request in finished:
            request.status = status
            self.running = [other for other in self.running if other is not request]
            self.waiting.remove_requests([request])
            self.consumer.finished(request, request.num_computed_tokens)
            self.finished_req_ids.add(request.request_id)
        return finished

    def reset_encoder_cache(self) -> None:
        self.encoder_cache_manager.reset()


class Queue(list[Any]):
    """`RequestQueue`."""

    def remove_requests(self, requests: list[Any]) -> None:
        self[:] = [request for request in self if request not in requests]

    def prepend_request(self, request: Any) -> None:
        self.insert(0, request)


class Scheduler(ParkingMixin, StandIn):  # type: ignore[misc]
    """As `ParkingScheduler` is."""


class Engine:
    """EngineCore's loop, a turn at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(
            "triptych_vllm_connector.scheduler.time", SimpleNamespace(monotonic=lambda: self.clock.now_s)
        )
        self.consumer = Consumer(
            INSTANCE,
            FakePinLink(),
            FakeTalkLink(),
            make_preallocator("sync", ROWS),
            lambda: 0,
            lambda: self.clock.now_s,
        )
        self.scheduler = Scheduler(self.consumer)

    def add(self, request_id: str, *items: str) -> Any:
        request = Held(**vars(fake_request(request_id, [(item, ROWS) for item in items])))
        self.scheduler.add_request(request)
        return request

    def comes(self, identifier: str, pin_id: int) -> None:
        self.consumer.post(PinReply(identifier, pinned(identifier, pin_id)))

    def run(self) -> int:
        """Until the engine would wait for input; how many steps that took."""
        before = self.scheduler.num_steps
        while self.scheduler.has_requests():
            assert self.scheduler.num_steps < before + 10, "the engine steps and steps"
            self.scheduler.schedule()
        return self.scheduler.num_steps - before


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_a_parked_request_costs_no_step(engine: Engine) -> None:
    engine.add("r1", A)
    assert engine.run() == 1
    assert engine.run() == 0
    assert engine.scheduler.make_stats().num_waiting_reqs == 1  # parked, and waiting for vLLM's metrics
    engine.comes(A, 1)
    assert engine.scheduler.has_requests()
    assert engine.scheduler.make_stats().num_waiting_reqs == 1


def test_a_running_request_that_waits_for_its_next_item_costs_no_step(engine: Engine) -> None:
    """Larger than the budget: it goes item by item."""
    request = engine.add("r1", A, B)
    engine.run()
    engine.comes(A, 1)
    assert engine.run() == 2  # one that computes A, one that finds B missing
    assert request in engine.scheduler.running
    assert engine.run() == 0
    engine.comes(B, 2)
    assert engine.scheduler.has_requests()
    engine.scheduler.schedule()
    assert request.num_computed_tokens == request.mm_features[1].mm_position.offset + ROWS + 2
    assert engine.consumer.counts()["preallocated_embeds"] == 0


def test_others_run_on_beside_a_stalled_request(engine: Engine) -> None:
    request, other = engine.add("r1", A, B), None
    engine.run()
    engine.comes(A, 1)
    engine.run()
    other = engine.add("r2", A)
    assert engine.scheduler.has_requests()
    engine.scheduler.schedule()
    assert other not in engine.scheduler.running  # waits for space, parked
    assert engine.run() == 0
    engine.scheduler.finish_requests(["r1"], RequestStatus.FINISHED_ABORTED)
    assert request not in engine.scheduler.running
    engine.comes(A, 3)
    engine.scheduler.schedule()
    assert other in engine.scheduler.running


@pytest.mark.parametrize("state", ["queued", "parked", "stalled"])
def test_what_waits_is_ended_when_its_time_is_up(engine: Engine, state: str) -> None:
    engine.add("r1", *((A, B) if state == "stalled" else (A,)))
    if state != "queued":
        engine.run()
    if state == "stalled":
        engine.comes(A, 1)
        engine.run()
    engine.clock.now_s += PATIENCE_S
    assert 1 <= engine.run() <= 2
    assert engine.scheduler.requests == {}
    assert set(engine.consumer.counts().values()) == {0}


def test_what_computes_is_not_ended(engine: Engine) -> None:
    engine.add("r1", A)
    engine.run()
    engine.comes(A, 1)
    engine.scheduler.has_requests()
    engine.scheduler.schedule()
    engine.clock.now_s += PATIENCE_S
    assert engine.scheduler.has_requests()
    engine.scheduler.schedule()
    assert "r1" in engine.scheduler.requests


@pytest.mark.parametrize("leaves", ["aborted", "preempted"])
def test_who_leaves_before_a_lost_load_is_told_leaves_no_wrong_block(engine: Engine, leaves: str) -> None:
    request, scheduler = engine.add("r1", A), engine.scheduler
    engine.run()
    engine.comes(A, 1)
    assert scheduler.has_requests()
    scheduled = scheduler.schedule()
    if leaves == "aborted":
        scheduler.finish_requests("r1", RequestStatus.FINISHED_ABORTED)
    else:
        scheduler._preempt_request(request)
    told = SimpleNamespace(
        ec_connector_output=SimpleNamespace(ec_connector_worker_meta=LostLoads(frozenset({A}))),
        req_id_to_index={"r1": 0},
        sampled_token_ids=[[7]],
    )
    scheduler.update_from_output(scheduled, told)
    assert scheduler.kv_cache_manager.evicted == {1, 2, 3}
    assert told.sampled_token_ids == [[]]
    assert engine.consumer.has_failed("r1") == (leaves == "preempted")
    assert list(scheduler._loads_in_flight.leavers({A})) == []
