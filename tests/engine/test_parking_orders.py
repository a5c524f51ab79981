"""Parking over vLLM's own schedulers in random orders, with loads that are lost.

Aborts, preemption, caches that are emptied, too few KV blocks, shared prefixes. No token that was
computed from zeros is ever sent, and no block computed from zeros stays in the prefix cache.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import mm_hash
from tests.support.vllm_connector.parking_engine import SCHEDULERS, STEP_TOKENS, ParkingEngine
from tests.support.vllm_connector.parking_worker import BLOCK_SIZE, RIGHT

ROWS = {mm_hash("a"): 4, mm_hash("b"): 7, mm_hash("c"): STEP_TOKENS + 3}
ITEMS = sorted(ROWS)
TEXTS = (1, 3, BLOCK_SIZE, BLOCK_SIZE + 5)
MAX_LIVE = 4
FEW_BLOCKS = 14
NUM_WALKS = 150
NUM_ACTIONS = 60


class Walk:
    """One order of actions, drawn at random. Names of what was done are kept, for the report of a failure."""

    def __init__(self, engine: ParkingEngine, seed: int) -> None:
        self.engine = engine
        self.chance = random.Random(seed)
        self.done: list[str] = []
        self.has_lost = False

    @property
    def live(self) -> list[str]:
        return [each for each in self.engine.tokens if each not in self.engine.ended]

    def run(self) -> None:
        weights: dict[Callable[[], str], int] = {
            self.turn: 12, self.answer: 6, self.add: 5, self.lose: 2, self.interrupt: 1, self.abort: 1,
            self.preempt: 1, self.reset: 1,
        }  # fmt: skip
        for action in self.chance.choices(list(weights), list(weights.values()), k=NUM_ACTIONS):
            self.done.append(action())
            self.check()
        self.engine.worker.losing.clear()
        self.engine.worker.when_loading.clear()
        for _ in range(3 * MAX_LIVE):
            self.answer()
            self.engine.run()
            self.check()
        assert not self.live, f"never served: {self.live}"
        assert self.has_lost or "error" not in self.engine.ended.values()
        self.engine.check_idle()

    def check(self) -> None:
        for request_id, tokens in self.engine.tokens.items():
            assert set(tokens) <= {RIGHT}, f"{request_id} has {tokens}"

    # ---- actions ---------------------------------------------------------------------------------
    def turn(self) -> str:
        if self.engine.has_work:
            self.engine.turn()
        return "turn"

    def answer(self) -> str:
        self.engine.answer_pins()
        return "answer"

    def add(self) -> str:
        if len(self.live) >= MAX_LIVE:
            return "add nothing"
        items = self.chance.choices(ITEMS, k=self.chance.choice((0, 1, 1, 2)))
        options: dict[str, Any] = {
            "rows": [ROWS[item] for item in items],
            "text": self.chance.choice(TEXTS),
            "max_tokens": self.chance.randint(1, 4),
            "prompt_logprobs": self.chance.choice((None, None, None, 1)),
        }
        self.engine.add(f"r{len(self.engine.tokens)}", *items, **options)
        return f"add {[item[-1] for item in items]} {options}"

    def lose(self) -> str:
        item = self.chance.choice(ITEMS)
        self.has_lost = True
        self.engine.worker.losing.add(item)
        return f"lose {item[-1]}"

    def interrupt(self) -> str:
        """Something happens between the scheduling of a step that loads an item and its output."""
        item, happens = self.chance.choice(ITEMS), self.chance.choice((self.abort, self.preempt, self.reset))
        self.engine.worker.when_loading[item] = happens
        return f"{happens.__name__} while {item[-1]} loads"

    def abort(self) -> str:
        if not self.live:
            return "abort nothing"
        request_id = self.chance.choice(self.live)
        self.engine.abort(request_id)
        return f"abort {request_id}"

    def preempt(self) -> str:
        self.engine.preempt()
        return "preempt"

    def reset(self) -> str:
        self.engine.reset_encoder_cache()
        return "reset"


@pytest.mark.parametrize(
    ("scheduler_cls", "num_in_flight"), SCHEDULERS, ids=["one step", "two steps in flight"]
)
def test_no_wrong_token_is_sent_in_any_order(
    scheduler_cls: type[Any], num_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(NUM_WALKS):
        engine = ParkingEngine(monkeypatch, scheduler_cls, num_in_flight, budget=30, num_blocks=FEW_BLOCKS)
        walk = Walk(engine, seed)
        try:
            walk.run()
        except AssertionError as error:
            done = "\n  ".join(walk.done)
            raise AssertionError(f"seed {seed}: {error}\nafter\n  {done}") from error
