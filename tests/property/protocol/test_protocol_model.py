"""The protocol among real parts: no deadlock, no leak, no unpinned item scheduled, in any order of steps.

Gateway, encoders, prefill_decodes and the store are the real ones but for HTTP, Redis and vLLM (see
`tests.support.protocol_world`). All orders of a small system are gone through; of larger ones those that
differ from the usual order in few places, with a fault at every place; and random ones with many faults.
docs/design/protocol_model.md has the figures.
"""

from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.support.examples import examples
from tests.support.protocol_steps import FABRIC_STEPS, STEPS
from tests.support.protocol_world.config import FAULTS, PIN_FAULTS, TOWER_FAULTS, Config
from tests.support.protocol_world.explore import Bounds, Explorer
from tests.support.protocol_world.random_walk import RareWalk, after, of_faults, take_every_kind, walk
from tests.support.protocol_world.virtual_loop import virtual_time
from tests.support.protocol_world.world import World

ONE = Config(requests=((0,),), rows=(2,))
TWO_ITEMS = Config()
TWO_OF_ALL = Config(requests=((0, 1), (1, 0)), num_consumers=2, num_encoders=2)
SHARED = replace(TWO_OF_ALL, shares_consumer=True)
LARGE = replace(SHARED, budget=3)  # each request is larger than the budget
CROWDED = replace(
    TWO_OF_ALL, requests=((0, 1), (2, 1)), rows=(2, 2, 2), num_blocks=2, num_reserve_blocks=1, is_tight=True
)
COVERED = replace(TWO_OF_ALL, strategy="async", prefix=4)
GATEWAYS = replace(TWO_OF_ALL, num_gateways=2)
ASYNC = replace(SHARED, steps_in_flight=2, step_tokens=7)  # an item is loaded while a step is in flight
SAME = replace(GATEWAYS, requests=((0,), (0,), (0,)), rows=(2,))
OVERLAP = replace(
    SHARED, requests=((0, 1), (1, 0), (2,)), rows=(2, 2, 2), budget=12, overlap=True, num_kv_blocks=22
)  # a prompt of two items takes 11 blocks: two of them fill the KV cache, and one is its half
CHOICES = replace(SHARED, num_choices=2)
ONE_OVERLAP = replace(TWO_ITEMS, overlap=True)
LARGE_OVERLAP = replace(LARGE, overlap=True)
ONE_ASYNC = replace(TWO_ITEMS, steps_in_flight=2, step_tokens=7)
ONE_FOR_TWO = Config(requests=((0,), (0,)), rows=(2,), num_gateways=2)
SYSTEMS = {
    "apart": TWO_OF_ALL,
    "shared": SHARED,
    "large": LARGE,
    "crowded": CROWDED,
    "covered": COVERED,
    "gateways": GATEWAYS,
    "async": ASYNC,
    "same": SAME,
    "choices": CHOICES,
    "overlap": OVERLAP,
    "overlap, async": replace(OVERLAP, steps_in_flight=2, step_tokens=7),
}

ALL, USUAL = Bounds(), Bounds(max_deviations=0)
QUICK: dict[str, tuple[Config, Bounds]] = {
    "1x1x1, all orders": (ONE, ALL),
    "1x1x1, 1 deviation, 1 fault": (
        replace(ONE, is_coarse=True, faults=FAULTS, max_faults=1),
        Bounds(max_deviations=1),
    ),
    "2x2x2, 1 deviation": (replace(TWO_OF_ALL, is_coarse=True), Bounds(max_deviations=1)),
    "2x2x1, 1 deviation": (replace(SHARED, is_coarse=True), Bounds(max_deviations=1)),
    "2x2x1 larger than the budget, 1 deviation": (replace(LARGE, is_coarse=True), Bounds(max_deviations=1)),
    "one item, 2 gateways, 1 deviation": (ONE_FOR_TWO, Bounds(max_deviations=1)),
    "one item, 2 gateways, usual order, 1 fault": (replace(ONE_FOR_TWO, faults=FAULTS, max_faults=1), USUAL),
    "1x2x1, 2 steps in flight, 1 deviation, 1 fault": (
        replace(
            ONE_ASYNC, is_coarse=True, faults=("lose_load", "preempt", "preempt_late", "cancel"), max_faults=1
        ),
        Bounds(max_deviations=1),
    ),
    "2x2x1, 2 steps in flight, usual order, 1 fault": (
        replace(ASYNC, is_coarse=True, faults=FAULTS, max_faults=1),
        USUAL,
    ),
    "1x2x1 overlap, 2 steps in flight, 1 deviation, 1 fault": (
        replace(
            ONE_OVERLAP,
            is_coarse=True,
            steps_in_flight=2,
            step_tokens=7,
            faults=("lose_load", "preempt", "preempt_late", "cancel"),
            max_faults=1,
        ),
        Bounds(max_deviations=1),
    ),
    "3x3x1 overlap, small KV cache, 1 deviation": (
        replace(OVERLAP, is_coarse=True),
        Bounds(max_deviations=1),
    ),
    "2x2x1 overlap, larger than the budget, 1 deviation": (
        replace(LARGE_OVERLAP, is_coarse=True),
        Bounds(max_deviations=1),
    ),
    "3x3x1 overlap, small KV cache, usual order, 1 fault": (
        replace(
            OVERLAP,
            is_coarse=True,
            max_faults=1,
            faults=("cancel", "preempt", "preempt_late", "crash_encoder", "evict", "lose_load", "prefix"),
        ),
        USUAL,
    ),
    "2x2x2, usual order, 1 fault": (replace(TWO_OF_ALL, is_coarse=True, faults=FAULTS, max_faults=1), USUAL),
    "2x2x1, usual order, 1 fault": (replace(SHARED, is_coarse=True, faults=FAULTS, max_faults=1), USUAL),
}

NUM_WALKS = 40  # of each system
RARE = (
    RareWalk(
        replace(TWO_OF_ALL, faults=("restart_store", "crash_consumer", "crash_encoder"), max_faults=9), 0.3
    ),
    RareWalk(after(TWO_OF_ALL, "unfit", "refuse", "preempt", "evict"), 0.3),
    RareWalk(after(TWO_OF_ALL, "unfit"), 0.3),
    RareWalk(
        replace(SAME, requests=((0,),) * 6, faults=("refuse", "lose_message", "cancel"), max_faults=9), 0.3
    ),
    RareWalk(replace(LARGE, faults=("lose_message", "hurry"), max_faults=9), 0.1),
    RareWalk(replace(LARGE, faults=("lose_message", "hurry", "preempt"), max_faults=9), 0.1),
    RareWalk(replace(ASYNC, faults=("preempt_late",), max_faults=9), 0.3),
    RareWalk(replace(TWO_OF_ALL, faults=("cancel", "crash_encoder"), max_faults=9), 0.3),
    RareWalk(after(TWO_OF_ALL, "lose_flights"), 0.3),
)
"""Systems that lead to what seldom happens in the others, where everything happens; with shares of faults."""
ON_REDIS = (
    "claim, owner, published", "claim, joined", "check, owner", "check, joined", "check, failed",
    "publish, gone", "leave, dropped",
    "start, started", "start, unwanted", "start, gone", "start, superseded",
)  # fmt: skip
"""What scripts of flights came to."""
NOT_MODELLED = frozenset(
    {
        "fetch_media",  # the model's media are small
        "ping",  # in place of an answer that a restart lost, where none is needed: here it comes at once
        "lookup", "stats", "list", "verify", "metrics", "evict", "evict_unreadable",  # operators, damage
        "heartbeat_gateway", "heartbeat_encoder", "heartbeat_consumer",
        "prefill", "prefilled", "decode", "first_decoded", "abort_prefill", "abort_decode",  # in stages
        *(each.name for each in FABRIC_STEPS),  # the model has one store
    }
)  # fmt: skip


def explore(name: str, config: Config, bounds: Bounds, capsys: pytest.CaptureFixture[str]) -> None:
    explored = Explorer(config, bounds).run()
    with capsys.disabled():
        print(
            f"\n  {name}: {explored.num_states} states, {explored.num_transitions} transitions, "
            f"{explored.num_ends} ends, depth {explored.max_depth}, {explored.cpu_seconds:.1f} s of CPU"
            f"{'' if explored.is_complete else ', stopped at the bound'}"
        )
    assert explored.is_complete or bounds.max_states is not None
    assert explored.num_ends


@pytest.mark.parametrize("name", QUICK)
def test_orders(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    explore(name, *QUICK[name], capsys)


KINDS = (
    *(each.name for each in STEPS if each.name not in NOT_MODELLED),
    *FAULTS, *TOWER_FAULTS, *PIN_FAULTS, *ON_REDIS,
    "job, new", "job, own", "job, takeover", "time", "reap", "thaw", "reconnect", "end",
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(RARE)))
def test_random_orders_of_what_is_rare(number: int) -> None:
    for seed in range(NUM_WALKS):
        walk(RARE[number].config, seed, RARE[number].fault_share)


def test_random_orders_with_many_faults_take_every_kind_of_step() -> None:
    faults = (*FAULTS, *TOWER_FAULTS, *PIN_FAULTS)
    rare = {**dict.fromkeys(KINDS, RARE), **of_faults(faults, [*SYSTEMS.values()])}
    take_every_kind(KINDS, SYSTEMS.values(), faults, NUM_WALKS, rare)


class ProtocolMachine(RuleBasedStateMachine):
    """Hypothesis draws the orders, and makes the ones that fail short."""

    def __init__(self) -> None:
        super().__init__()
        self.held = ExitStack()
        self.held.enter_context(virtual_time())
        self.world = World(ONE)

    @initialize(system=st.sampled_from(sorted(SYSTEMS)), is_coarse=st.booleans())
    def start(self, system: str, is_coarse: bool) -> None:
        self.world.close()
        self.world = World(replace(SYSTEMS[system], is_coarse=is_coarse, faults=FAULTS, max_faults=5))

    @rule(data=st.data())
    def steps(self, data: st.DataObject) -> None:
        for index in data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=12)):
            enabled = [each for each in self.world.enabled() if not each.is_fault]
            if not enabled:
                return
            self.take(enabled[index % len(enabled)].key)

    @precondition(lambda self: any(each.is_fault for each in self.world.enabled()))
    @rule(data=st.data())
    def fault(self, data: st.DataObject) -> None:
        faults = [each.key for each in self.world.enabled() if each.is_fault]
        self.take(data.draw(st.sampled_from(faults)))

    def take(self, key: object) -> None:
        self.world.take(key)
        self.world.check()

    def teardown(self) -> None:
        with self.held:
            for _ in range(5000):
                enabled = [each for each in self.world.enabled() if not each.is_fault]
                if not enabled:
                    break
                self.take(enabled[0].key)
            else:
                raise AssertionError("it never ends")
            self.world.check_quiet()
            self.world.close()


TestProtocol = ProtocolMachine.TestCase
TestProtocol.settings = settings(max_examples=examples(60), stateful_step_count=15)
