"""A flood of one key beside another key's single items, in virtual time: the gateway's queue and the gate."""

import heapq
from collections import deque

import pytest

from triptych_common.domain.fair_turns import FairTurns, Lane
from triptych_common.protocol.ids import MmHash
from triptych_encoder.jobs.gate_policy import MAX_BATCHES, GateItem, GatePolicy
from triptych_gateway.encode.job_window import JobWindow
from triptych_gateway.routing.encode_capacity import Capacity

ENCODE_S = 0.2
NUM_SLOTS = 10
FLOOD, ONE = Lane(flow="f"), Lane(flow="1")
DIGEST = "d" * 64


class OneEncoder:
    """Gateways with a queue each, a stream, and an encoder that takes one item at a time, or a batch."""

    def __init__(self, num_gateways: int, encode_batch: int) -> None:
        capacity = Capacity(NUM_SLOTS, NUM_SLOTS // 4, num_gateways)
        self.windows = [JobWindow(lambda digest: capacity) for _ in range(num_gateways)]
        self.turns = [FairTurns() for _ in range(num_gateways)]
        self.queues: list[dict[Lane, deque[float]]] = [{} for _ in range(num_gateways)]
        self.stream: deque[tuple[int, MmHash, GateItem]] = deque()
        self.hands: dict[GateItem, tuple[int, MmHash]] = {}
        self.policy = GatePolicy(encode_batch)
        self.batches: deque[list[GateItem]] = deque()
        self.events: list[tuple[float, int, str]] = []
        self.num_jobs = 0
        self.waited: dict[Lane, list[float]] = {FLOOD: [], ONE: []}

    def order(self, at: float, gateway: int, lane: Lane, num: int = 1) -> None:
        self.queues[gateway].setdefault(lane, deque()).extend([at] * num)

    def publish(self) -> None:
        for number, (window, turns, queue) in enumerate(
            zip(self.windows, self.turns, self.queues, strict=True)
        ):
            window.note_stream(DIGEST, len(self.stream) + len(self.hands))
            while lanes := [each for each, at in queue.items() if at and window.has_room(DIGEST, each.flow)]:
                lane = turns.next_lane(lanes)
                turns.take_turn(lane, 1.0, lanes)
                self.num_jobs += 1
                name = MmHash(f"{self.num_jobs:064x}")
                window.begin_job(name, DIGEST, lane.flow)
                at = queue[lane].popleft()
                item = GateItem(frozenset({(f"r{self.num_jobs}", 0)}), at, at + 1e4, lane)
                self.stream.append((number, name, item))

    def take(self, now: float) -> None:
        while self.stream and len(self.hands) < NUM_SLOTS:
            number, name, item = self.stream.popleft()
            self.hands[item] = (number, name)
            self.policy.add_item(item)
            self.policy.set_ready(item)
        while batch := self.policy.take_batch():
            if self.batches and len(self.batches) == MAX_BATCHES:
                self.batches[-1].extend(batch)
                continue
            self.batches.append(batch)
            if len(self.batches) == 1:
                heapq.heappush(self.events, (now + ENCODE_S * len(batch), 1, ""))

    def finish(self, now: float) -> None:
        for item in self.batches.popleft():
            number, name = self.hands.pop(item)
            self.policy.remove_item(item)
            self.windows[number].end_job(name)
            self.waited[item.lane].append(now - item.published_at)
        if self.batches:
            heapq.heappush(self.events, (now + ENCODE_S * len(self.batches[0]), 1, ""))


def run(num_gateways: int, encode_batch: int, num_flood: int, num_seconds: int) -> OneEncoder:
    """The flood comes at once to the first gateway, the other key's items one a second to the last."""
    world = OneEncoder(num_gateways, encode_batch)
    world.order(0.0, 0, FLOOD, num_flood)
    world.events = [(0.0, 0, "flood"), *((0.07 + n, 0, "one") for n in range(num_seconds))]
    heapq.heapify(world.events)
    while world.events and world.events[0][0] <= num_seconds:
        now, kind, what = heapq.heappop(world.events)
        if kind:
            world.finish(now)
        elif what == "one":
            world.order(now, num_gateways - 1, ONE)
        world.publish()
        world.take(now)
    return world


@pytest.mark.parametrize(("num_gateways", "encode_batch"), [(1, 1), (1, 4), (2, 1), (3, 4)])
def test_no_item_waits_for_the_length_of_a_flood(num_gateways: int, encode_batch: int) -> None:
    """What vLLM has goes first: two batches; then the item, whose batch others may share."""
    bound_s = ENCODE_S * encode_batch * (MAX_BATCHES + 1) + 1e-6
    for num_flood in (50, 1000):
        world = run(num_gateways, encode_batch, num_flood, 40)
        assert len(world.waited[ONE]) >= 36
        assert max(world.waited[ONE]) <= bound_s


@pytest.mark.parametrize("num_gateways", [1, 3])
def test_the_encoder_is_never_idle_meanwhile(num_gateways: int) -> None:
    world = run(num_gateways, 1, 1000, 40)
    assert len(world.waited[ONE]) + len(world.waited[FLOOD]) >= 40 / ENCODE_S - 2
