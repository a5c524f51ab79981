"""A flood of one key beside another key's items, in virtual time: the gateway's real queue, and the gate."""

import asyncio
import heapq
from collections import defaultdict, deque

import pytest

from triptych_common.domain.fair_turns import MAX_WAIT_TURNS, Lane
from triptych_common.protocol.ids import MmHash, RequestId
from triptych_common.protocol.messages import EncodeClass, Modality
from triptych_common.protocol.names import DEFAULT_STORE
from triptych_encoder.jobs.gate_policy import MAX_BATCHES, GateItem, GatePolicy
from triptych_gateway.encode.encode_job import place_of
from triptych_gateway.encode.item_queue import ItemQueue, OrderPlace
from triptych_gateway.encode.job_window import JobWindow
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.image_header import ImageHeader
from triptych_gateway.request.media import TakenItem
from triptych_gateway.routing.encode_capacity import Capacity

ENCODE_S = 0.2
NUM_SLOTS = 10
PER_REQUEST = 10  # items of each of the flood's requests
FLOOD, ONE = Lane(flow="f"), Lane(flow="1")
LATER = Lane(EncodeClass.BATCH, "f")  # of the flood's own key
DIGEST = "d" * 64


def hash_of(number: int) -> MmHash:
    return MmHash(f"{number:064x}")


def taken_item(mm_hash: MmHash, index: int) -> TakenItem:
    part = MediaPart(index, (), Modality.IMAGE, "", "")
    return TakenItem(part, mm_hash, b"", ImageHeader("PNG", 1, 1), {}, {})


class OneEncoder:
    """Gateways with a queue each, a stream, and an encoder that takes one item at a time, or a batch.

    `is_predicted`: it knows how long an encode takes.
    """

    def __init__(self, num_gateways: int, encode_batch: int, *, is_predicted: bool = False) -> None:
        self.is_predicted = is_predicted
        capacity = Capacity(NUM_SLOTS, NUM_SLOTS // 4, num_gateways)
        self.queues = [ItemQueue(JobWindow(lambda digest: capacity)) for _ in range(num_gateways)]
        self.taking = [asyncio.ensure_future(queue.take_item()) for queue in self.queues]
        self.stream: deque[tuple[int, MmHash, GateItem]] = deque()
        self.hands: dict[GateItem, tuple[int, MmHash]] = {}
        self.policy = GatePolicy(encode_batch)
        self.batches: deque[list[GateItem]] = deque()
        self.events: list[tuple[float, int, str]] = []
        self.num_items = 0
        self.wait_of: dict[MmHash, MediaWait] = {}
        self.ordered: defaultdict[MmHash, list[tuple[float, Lane]]] = defaultdict(list)
        self.waited: dict[Lane, list[float]] = {FLOOD: [], ONE: [], LATER: []}

    def order(self, at: float, gateway: int, lane: Lane, num: int = 1) -> None:
        """One request with so many new items."""
        hashes = [hash_of(self.num_items + each) for each in range(num)]
        self.num_items += num
        items = tuple(taken_item(mm_hash, index) for index, mm_hash in enumerate(hashes))
        media_wait = MediaWait(RequestId(f"r{hashes[0]}"), "pd-0", items, at + 60.0, None, DIGEST, lane=lane)
        queue = self.queues[gateway]
        for mm_hash in hashes:
            name, place = place_of(mm_hash, [media_wait], queue, at)
            queue.add_item(mm_hash, is_urgent=True, request=name, place=place)
            self.wait_of[mm_hash] = media_wait
            self.ordered[mm_hash].append((at, lane))

    def join(self, at: float, gateway: int, lane: Lane, mm_hash: MmHash) -> None:
        """A request that wants an item which is ordered already."""
        items = (taken_item(mm_hash, 0),)
        joined = MediaWait(RequestId(f"j{mm_hash}"), "pd-0", items, at + 60.0, None, DIGEST, lane=lane)
        queue = self.queues[gateway]
        name, place = place_of(mm_hash, [self.wait_of[mm_hash], joined], queue, at)
        if queue.withdraw_item(mm_hash):
            queue.add_item(mm_hash, is_urgent=True, request=name, place=place)
        self.ordered[mm_hash].append((at, lane))

    async def publish(self, now: float) -> None:
        for number, queue in enumerate(self.queues):
            queue.note_stream(DIGEST, len(self.stream) + len(self.hands))
            while await self._has_taken(number):
                mm_hash, _ = self.taking[number].result()
                lane = queue.lane_held(mm_hash)
                assert lane is not None
                item = GateItem(frozenset({(mm_hash, 0)}), now, now + 1e4, lane)
                item.seconds = ENCODE_S * self.is_predicted
                self.stream.append((number, mm_hash, item))
                queue.confirm_job(mm_hash, DEFAULT_STORE)
                queue.finish_item(mm_hash)
                self.taking[number] = asyncio.ensure_future(queue.take_item())

    async def _has_taken(self, number: int) -> bool:
        for _ in range(3):  # a task begins, is woken and ends
            await asyncio.sleep(0)
        return self.taking[number].done()

    def take(self, now: float) -> None:
        while self.stream and len(self.hands) < NUM_SLOTS:
            number, name, item = self.stream.popleft()
            self.hands[item] = (number, name)
            self.policy.add_item(item)
            self.policy.set_ready(item)
        while batch := self.policy.take_batch(now):
            if self.batches and len(self.batches) == MAX_BATCHES:
                self.batches[-1].extend(batch)
                continue
            self.batches.append(batch)
            if len(self.batches) == 1:
                heapq.heappush(self.events, (now + ENCODE_S * len(batch), 1, ""))
        if self.policy.held_until is not None:
            heapq.heappush(self.events, (self.policy.held_until, 0, "hand over"))

    def finish(self, now: float) -> None:
        for item in self.batches.popleft():
            number, name = self.hands.pop(item)
            self.policy.remove_item(item)
            self.queues[number].end_job(name)
            for at, lane in self.ordered.pop(name):
                self.waited[lane].append(now - at)
        if self.batches:
            heapq.heappush(self.events, (now + ENCODE_S * len(self.batches[0]), 1, ""))

    async def go_on(self, until: float, others: Lane = ONE, gateway: int = 0, shares: bool = False) -> None:
        """To `until`. Once a second `others` order an item at `gateway`: `shares`: the last of the flood."""
        self.events += [(0.0, 0, "flood"), *((0.07 + n, 0, "other") for n in range(int(until)))]
        heapq.heapify(self.events)
        num_flood = self.num_items
        while self.events and self.events[0][0] <= until:
            now, kind, what = heapq.heappop(self.events)
            if kind:
                self.finish(now)
            elif what == "other" and shares:
                num_flood -= 1
                self.join(now, gateway, others, hash_of(num_flood))
            elif what == "other":
                self.order(now, gateway, others)
            await self.publish(now)
            self.take(now)
        for task in self.taking:
            task.cancel()


def flooded(
    num_gateways: int, encode_batch: int, num_flood: int, *, is_predicted: bool = False
) -> OneEncoder:
    """The flood comes at once to the first gateway."""
    world = OneEncoder(num_gateways, encode_batch, is_predicted=is_predicted)
    for _ in range(num_flood // PER_REQUEST):
        world.order(0.0, 0, FLOOD, PER_REQUEST)
    return world


def bound_s(encode_batch: int) -> float:
    """What vLLM has goes first: two batches; then the item, whose batch others may share."""
    return ENCODE_S * encode_batch * (MAX_BATCHES + 1) + 1e-6


@pytest.mark.parametrize(
    ("num_gateways", "gateway", "encode_batch"),
    [(1, 0, 1), (1, 0, 4), (2, 0, 1), (2, 1, 1), (3, 0, 4), (3, 2, 4)],
)
async def test_no_item_waits_for_the_length_of_a_flood(
    num_gateways: int, gateway: int, encode_batch: int
) -> None:
    """Also at the gateway that has the flood."""
    for num_flood in (50, 1000):
        world = flooded(num_gateways, encode_batch, num_flood)
        await world.go_on(40, gateway=gateway)
        assert len(world.waited[ONE]) >= 36
        assert max(world.waited[ONE]) <= bound_s(encode_batch)


async def test_where_encodes_are_predicted_an_item_waits_for_the_one_that_is_computed() -> None:
    world = flooded(1, 1, 1000, is_predicted=True)
    await world.go_on(40)
    assert len(world.waited[ONE]) >= 36
    assert max(world.waited[ONE]) <= ENCODE_S * 2 + 1e-6
    num_encoded = len(world.waited[ONE]) + len(world.waited[FLOOD])
    assert num_encoded >= 40 / ENCODE_S - 2, "the encoder is never idle"


@pytest.mark.parametrize("num_gateways", [1, 2])
async def test_an_item_that_the_flood_has_ordered_does_not_wait_for_it(num_gateways: int) -> None:
    world = flooded(num_gateways, 1, 1000)
    await world.go_on(40, shares=True)
    assert len(world.waited[ONE]) >= 36
    assert max(world.waited[ONE]) <= bound_s(1)


async def test_a_lower_class_of_the_floods_own_key_has_its_turns() -> None:
    world = flooded(1, 1, 1000)
    await world.go_on(80, LATER)
    num = len(world.waited[LATER])
    assert 80 / ENCODE_S / (2 * MAX_WAIT_TURNS) <= num <= 80 / ENCODE_S / 2


@pytest.mark.parametrize("num_gateways", [1, 3])
async def test_the_encoder_is_never_idle_meanwhile(num_gateways: int) -> None:
    world = flooded(num_gateways, 1, 1000)
    await world.go_on(40, gateway=num_gateways - 1)
    assert len(world.waited[ONE]) + len(world.waited[FLOOD]) >= 40 / ENCODE_S - 2


def test_of_the_requests_of_a_lane_one_stands_for_all() -> None:
    """However many share an item: each that joins or leaves looks for its place anew."""
    compared: list[str] = []

    class CountingQueue(ItemQueue):
        def start_of(self, mm_hash: MmHash, request: str, place: OrderPlace) -> float:
            compared.append(request)
            return super().start_of(mm_hash, request, place)

    queue = CountingQueue(JobWindow(lambda digest: Capacity(NUM_SLOTS, NUM_SLOTS, 1)))
    item = taken_item(hash_of(1), 0)
    waits = [
        MediaWait(RequestId(f"{lane.flow}{at}"), "pd-0", (item,), 60.0 - at, None, DIGEST, lane=lane)
        for at in range(50)
        for lane in (FLOOD, ONE)
    ]
    name, place = place_of(item.mm_hash, waits, queue, 0.0)
    assert place is not None
    assert (name, place.deadline) == ("f49", 11.0)
    assert sorted(compared) == ["149", "f49"]
    compared.clear()
    assert place_of(item.mm_hash, waits[::2], queue, 0.0)[0] == "f49"
    assert not compared, "there is nothing to compare"
