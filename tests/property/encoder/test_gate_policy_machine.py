"""The gate under random jobs: bounded batches, nothing twice, nothing lost, nothing overtaken for ever."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.examples import examples
from triptych_common.domain.fair_queue import FairKey
from triptych_encoder.jobs.gate_policy import MAX_BATCHES, MAX_OVERTAKE_S, GateItem, GatePolicy

KEYS = tuple(FairKey(flow=name) for name in ("", "a", "b"))
ALIVE_S = 5.0  # that a job has left when it comes, at least


class GateMachine(RuleBasedStateMachine):
    """Items come, are prepared, go into the engine, and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.unprepared: list[GateItem] = []
        self.ready: list[GateItem] = []
        self.batches: list[list[GateItem]] = []
        self.began_at: dict[str, float] = {}  # of requests
        self.came_at: dict[int, float] = {}  # of items: when the oldest of their requests came
        self.num_requests = 0

    @initialize(encode_batch=st.integers(1, 5))
    def begin(self, encode_batch: int) -> None:
        self.encode_batch = encode_batch
        self.policy = GatePolicy(encode_batch)

    @rule(num_items=st.integers(1, 5), is_new=st.booleans(), left_s=st.floats(ALIVE_S, 60), data=st.data())
    def publish(self, num_items: int, is_new: bool, left_s: float, data: st.DataObject) -> None:
        """A request's items; some of them others wait for, too."""
        self.num_requests += 1
        for index in range(num_items):
            places = {(f"r{self.num_requests}", index)}
            if not is_new and data.draw(st.booleans()):
                places.add((f"r{data.draw(st.integers(1, self.num_requests))}", index))
            item = GateItem(frozenset(places), self.now, self.now + left_s, data.draw(st.sampled_from(KEYS)))
            item.seconds = data.draw(st.sampled_from((0.0, 0.01, 1.0)))
            self.policy.add_item(item)
            self.unprepared.append(item)
            self.came_at[id(item)] = min(self.began_at.setdefault(request, self.now) for request, _ in places)

    @precondition(lambda self: self.unprepared)
    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        item = self.unprepared.pop(data.draw(st.integers(0, len(self.unprepared) - 1)))
        self.policy.set_ready(item)
        self.ready.append(item)

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def hand_over(self) -> None:
        room_before = MAX_BATCHES - len(self.batches)
        batch = self.policy.take_batch(self.now)
        if not batch:
            held_until = self.policy.held_until
            assert held_until is None or (self.batches and held_until > self.now), "nobody asks again"
            assert not self.ready or self.batches, "the engine starves while items are ready"
            return
        assert len(set(batch)) == len(batch)
        for item in batch:
            self.ready.remove(item)
            self._assert_no_one_starves(item)
        if room_before:
            self.batches.append(batch)
        else:
            self.batches[-1] += batch

    def _assert_no_one_starves(self, chosen: GateItem) -> None:
        for other in self.ready:
            if other.key != chosen.key:
                continue  # of others' turns, `test_fair_queue`
            late_s = self.came_at[id(chosen)] - self.came_at[id(other)]
            assert late_s <= MAX_OVERTAKE_S, f"came {late_s} s later, and goes first"

    @precondition(lambda self: self.batches)
    @rule()
    def finish_batch(self) -> None:
        for item in self.batches.pop(0):
            self.policy.remove_item(item)

    @precondition(lambda self: self.ready or self.unprepared)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Its requesters left, or its job failed."""
        found = [*self.ready, *self.unprepared]
        item = found[data.draw(st.integers(0, len(found) - 1))]
        (self.ready if item in self.ready else self.unprepared).remove(item)
        self.policy.remove_item(item)

    @invariant()
    def books_agree(self) -> None:
        assert self.policy.num_ready == len(self.ready)
        assert self.policy.num_in_engine == sum(map(len, self.batches))
        assert all(len(batch) <= self.encode_batch for batch in self.batches)
        assert len(self.batches) <= MAX_BATCHES


TestGatePolicy = GateMachine.TestCase
TestGatePolicy.settings = settings(max_examples=examples(100), stateful_step_count=40)
