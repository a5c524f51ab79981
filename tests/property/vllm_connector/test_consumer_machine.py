"""The consumer among models of store, encoders, gateway, scheduler and worker, in random interleavings.

Several requests over four items, with a budget smaller than some requests, and with none. After every step:
space is what the held items need, and within the budget; every pin has exactly one owner; no request is
parked for nothing. In every scheduled step all its items are there. At the end every request is served, every
encoder got its ack, and nothing is held.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.vllm_connector.consumer_checks import HASHES
from tests.support.vllm_connector.consumer_world import World
from triptych_vllm_connector.consumer.overlap import NO_OVERLAP, OverlapPolicy

MAX_LIVE = 6
ITEMS = st.lists(st.sampled_from(HASHES[:1] + HASHES), min_size=1, max_size=4)


class ConsumerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World("sync", 6, 1000, 1)
        self.may_lose_store = False

    @initialize(
        strategy=st.sampled_from(["sync", "sync", "async"]),
        budget=st.sampled_from([5, 7, 9, 20]),
        kv_tokens=st.sampled_from([45, 1000]),
        max_in_flight=st.sampled_from([1, 2]),
        may_lose_store=st.sampled_from([False, False, False, True]),
        overlap=st.sampled_from([NO_OVERLAP, OverlapPolicy(min_tokens=1), OverlapPolicy(min_tokens=4)]),
    )
    def start(
        self,
        strategy: str,
        budget: int,
        kv_tokens: int,
        max_in_flight: int,
        may_lose_store: bool,
        overlap: OverlapPolicy,
    ) -> None:
        self.world = World(strategy, budget, kv_tokens, max_in_flight, overlap)
        self.may_lose_store = may_lose_store

    # ---- requests --------------------------------------------------------------------------------
    @precondition(lambda self: len(self.world.live) < MAX_LIVE)
    @rule(
        items=ITEMS,
        has_gateway=st.sampled_from([True, True, True, False]),
        is_ordered=st.booleans(),
        prefix=st.sampled_from([0, 0, 5, 12, 99]),
    )
    def request_comes(self, items: list[str], has_gateway: bool, is_ordered: bool, prefix: int) -> None:
        self.world.add(items, has_gateway=has_gateway, request_id=None, is_ordered=is_ordered, prefix=prefix)

    @precondition(lambda self: len(self.world.live) < MAX_LIVE)
    @rule(items=ITEMS, prefix=st.sampled_from([0, 0, 5, 99]))
    def whole_request_comes(self, items: list[str], prefix: int) -> None:
        """To be encoded here; its items may even have the names of others'."""
        self.world.add(
            items, has_gateway=False, request_id=None, is_ordered=False, prefix=prefix, is_local=True
        )

    @precondition(lambda self: 0 < len(self.world.live) < MAX_LIVE)
    @rule(data=st.data())
    def sibling_comes(self, data: st.DataObject) -> None:
        """`n` > 1: the same request again, under another engine id."""
        sibling = self.world.live[data.draw(st.sampled_from(sorted(self.world.live)))]
        items = [feature.identifier for feature in sibling.request.mm_features]
        self.world.add(items, has_gateway=True, request_id=sibling.request_id, is_ordered=False)

    @precondition(lambda self: self.world.waiting or self.world.parked)
    @rule(data=st.data())
    def prefix_cache_changes(self, data: st.DataObject) -> None:
        engine_request_id = data.draw(st.sampled_from(sorted({*self.world.waiting, *self.world.parked})))
        each = self.world.live[engine_request_id]
        each.prefix = data.draw(st.sampled_from([0, each.prompt_len // 2, each.prompt_len - 1]))

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def request_is_aborted(self, data: st.DataObject) -> None:
        self.world.finish(data.draw(st.sampled_from(sorted(self.world.live))))

    @precondition(lambda self: self.world.answered)
    @rule()
    def request_is_answered(self) -> None:
        self.world.finish(self.world.answered[0])

    @precondition(lambda self: self.world.waiting or self.world.parked)
    @rule(data=st.data())
    def time_is_up(self, data: st.DataObject) -> None:
        waiting = sorted({*self.world.waiting, *self.world.parked})
        self.world.end_overdue(data.draw(st.sampled_from(waiting)))

    @rule()
    def encoder_cache_is_emptied(self) -> None:
        self.world.reset_encoder_cache()

    # ---- vLLM ------------------------------------------------------------------------------------
    @rule(chunk=st.sampled_from([2, 4, 100]))
    def step(self, chunk: int) -> None:
        self.world.schedule(chunk)

    @rule()
    def step_without_kv_space(self) -> None:
        self.world.schedule(100, kv_fails=True)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), chunk=st.sampled_from([2, 100]))
    def step_that_preempts(self, data: st.DataObject, chunk: int) -> None:
        self.world.schedule(chunk, preempts=data.draw(st.sampled_from(self.world.running)))

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def worker_answers(self) -> None:
        self.world.update()

    # ---- the others ------------------------------------------------------------------------------
    @precondition(lambda self: self.world.store.commands)
    @rule(all_of_them=st.booleans())
    def store_runs(self, all_of_them: bool) -> None:
        self.world.store.run_next()
        while all_of_them and self.world.store.commands:
            self.world.store.run_next()

    @precondition(lambda self: self.world.store.to_engine)
    @rule(data=st.data())
    def consumer_receives(self, data: st.DataObject) -> None:
        self.world.deliver(data.draw(st.integers(0, len(self.world.store.to_engine) - 1)))

    @precondition(lambda self: self.world.store.to_engine)
    @rule()
    def consumer_receives_everything(self) -> None:
        while self.world.store.to_engine:
            self.world.deliver(0)

    @precondition(lambda self: self.world.sender.needs)
    @rule(data=st.data())
    def gateway_receives(self, data: st.DataObject) -> None:
        self.world.gateway_receives(data.draw(st.integers(0, len(self.world.sender.needs) - 1)))

    @precondition(lambda self: self.world.orders)
    @rule(data=st.data())
    def encoder_starts(self, data: st.DataObject) -> None:
        self.world.encode(*data.draw(st.sampled_from(sorted(self.world.orders))))

    @precondition(lambda self: self.world.store.writing)
    @rule(data=st.data())
    def encoder_seals(self, data: st.DataObject) -> None:
        self.world.store.seal(data.draw(st.sampled_from(sorted(self.world.store.writing))))

    @precondition(lambda self: self.world.store.writing)
    @rule(data=st.data())
    def encoder_dies(self, data: st.DataObject) -> None:
        self.world.store.lose_writer(data.draw(st.sampled_from(sorted(self.world.store.writing))))

    @precondition(lambda self: self.world.store.sealed)
    @rule(data=st.data())
    def store_evicts(self, data: st.DataObject) -> None:
        self.world.store.evict(data.draw(st.sampled_from(sorted(self.world.store.sealed))))

    @precondition(lambda self: self.world.store.commands and not self.world.store.is_lost)
    @rule(is_unlucky=st.sampled_from([True, False, False]))
    def store_refuses(self, is_unlucky: bool) -> None:
        self.world.store.refuses_next = is_unlucky

    @precondition(lambda self: self.may_lose_store and not self.world.store.is_lost)
    @rule(is_unlucky=st.sampled_from([True, False, False, False]))
    def store_is_lost(self, is_unlucky: bool) -> None:
        if is_unlucky:
            self.world.lose_store()

    # ---- what always holds -----------------------------------------------------------------------
    @invariant()
    def space_is_what_is_held(self) -> None:
        self.world.check_space()

    @invariant()
    def every_pin_has_one_owner(self) -> None:
        self.world.check_pins()

    @invariant()
    def no_request_is_lost(self) -> None:
        self.world.check_no_request_is_lost()

    def teardown(self) -> None:
        self.world.run_to_the_end()
        assert set(self.world.consumer.counts().values()) == {0}
        assert self.world.sender.acks >= self.world.expected_acks
        assert not self.world.worker
        assert not self.world.cached
        assert not self.world.store.pins
        assert not self.world.store.watches


ConsumerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestConsumer = ConsumerMachine.TestCase
