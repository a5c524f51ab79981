"""Parking over vLLM's own schedulers in random orders, with loads that are lost.

Aborts, preemption, caches that are emptied, too few KV blocks, shared prefixes. No token is ever told that
was computed from zeros, and nothing that was stays in the prefix cache.
"""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.fake_engine import mm_hash
from support.parking_engine import BLOCK_SIZE, RIGHT, SCHEDULERS, STEP_TOKENS, ParkingEngine

ROWS = {mm_hash("a"): 4, mm_hash("b"): 7, mm_hash("c"): STEP_TOKENS + 3}
ITEMS = sorted(ROWS)
MAX_LIVE = 4
FEW_BLOCKS = 14


class ParkingMachine(RuleBasedStateMachine):
    scheduler_cls, num_in_flight = SCHEDULERS[0]

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.engine = ParkingEngine(
            self.patch, self.scheduler_cls, self.num_in_flight, budget=30, num_blocks=FEW_BLOCKS
        )
        self.num_requests = 0
        self.has_lost = False

    @property
    def live(self) -> list[str]:
        return [each for each in self.engine.told if each not in self.engine.ended]

    # ---- requests --------------------------------------------------------------------------------
    @precondition(lambda self: len(self.live) < MAX_LIVE)
    @rule(
        items=st.lists(st.sampled_from(ITEMS), max_size=2),
        text=st.sampled_from([1, 3, BLOCK_SIZE, BLOCK_SIZE + 5]),
        max_tokens=st.integers(1, 4),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
    )
    def request_comes(
        self, items: list[str], text: int, max_tokens: int, prompt_logprobs: int | None
    ) -> None:
        self.num_requests += 1
        self.engine.add(
            f"r{self.num_requests}",
            *items,
            rows=[ROWS[item] for item in items],
            text=text,
            max_tokens=max_tokens,
            prompt_logprobs=prompt_logprobs,
        )

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def request_is_aborted(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.live)))

    @rule()
    def store_answers(self) -> None:
        self.engine.answer_pins()

    # ---- vLLM ------------------------------------------------------------------------------------
    @precondition(lambda self: self.engine.has_work)
    @rule(num_turns=st.integers(1, 3))
    def turns(self, num_turns: int) -> None:
        for _ in range(num_turns):
            if self.engine.has_work:
                self.engine.turn()

    @rule()
    def all_are_preempted(self) -> None:
        self.engine.preempt()

    @rule()
    def encoder_cache_is_emptied(self) -> None:
        self.engine.reset_encoder_cache()

    # ---- faults ----------------------------------------------------------------------------------
    @rule(item=st.sampled_from(ITEMS))
    def next_load_is_lost(self, item: str) -> None:
        self.has_lost = True
        self.engine.worker.losing.add(item)

    @rule(item=st.sampled_from(ITEMS), what=st.sampled_from(["abort", "preempt", "reset"]))
    def something_happens_while_it_loads(self, item: str, what: str) -> None:
        happens: dict[str, Callable[[], object]] = {
            "abort": lambda: self.engine.abort(self.live[0]) if self.live else None,
            "preempt": self.engine.preempt,
            "reset": self.engine.reset_encoder_cache,
        }
        self.engine.worker.when_loading[item] = happens[what]

    # ---- what always holds -----------------------------------------------------------------------
    @invariant()
    def nothing_wrong_is_told(self) -> None:
        for request_id, tokens in self.engine.told.items():
            assert set(tokens) <= {RIGHT}, f"{request_id} is told {tokens}"

    def teardown(self) -> None:
        try:
            self.engine.worker.losing.clear()
            self.engine.worker.when_loading.clear()
            for _ in range(3 * MAX_LIVE + 3):
                self.engine.answer_pins()
                self.engine.run()
            assert not self.live, f"never served: {self.live}"
            assert self.has_lost or "error" not in self.engine.ended.values()
            self.engine.check_idle()
        finally:
            self.patch.undo()


class TwoInFlightMachine(ParkingMachine):
    scheduler_cls, num_in_flight = SCHEDULERS[1]


TestOneStep = ParkingMachine.TestCase
TestTwoStepsInFlight = TwoInFlightMachine.TestCase
TestOneStep.settings = TestTwoStepsInFlight.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
