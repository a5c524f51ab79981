"""Parking over vLLM's own schedulers in random orders, with loads that are lost.

Aborts, preemption, caches that are emptied, too few KV blocks, shared prefixes. No token that was
computed from zeros is ever sent, and no block computed from zeros stays in the prefix cache. With overlap,
items come one by one, and stalled requests give way before any that runs.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import mm_hash
from tests.support.vllm_connector.parking_engine import SCHEDULERS, STEP_TOKENS, TEXT, ParkingEngine
from tests.support.vllm_connector.parking_worker import BLOCK_SIZE, RIGHT

ROWS = {mm_hash("a"): 4, mm_hash("b"): 7, mm_hash("c"): STEP_TOKENS + 3}
ITEMS = sorted(ROWS)
TEXTS = (1, 3, BLOCK_SIZE, BLOCK_SIZE + 5)
LONG_TEXTS = (1, 4 * BLOCK_SIZE, 8 * BLOCK_SIZE)  # of requests without an item
MAX_LIVE = 4
BUDGET = 30  # all of the items
SMALL_BUDGET = 20  # requests with several of them go item by item
FEW_BLOCKS = 14
NUM_WALKS = 150
NUM_OVERLAP_WALKS = 240
NUM_ACTIONS = 60


class Walk:
    """One order of actions, drawn at random. Names of what was done are kept, for the report of a failure."""

    def __init__(self, engine: ParkingEngine, seed: int, *, is_slow: bool) -> None:
        self.engine = engine
        self.is_slow = is_slow  # items come seldom, and one by one
        self.chance = random.Random(seed)
        self.done: list[str] = []
        self.has_lost = False

    @property
    def live(self) -> list[str]:
        return [each for each in self.engine.tokens if each not in self.engine.ended]

    def run(self) -> None:
        weights: dict[Callable[[], str], int] = {
            self.turn: 12, self.answer: 1 if self.is_slow else 6, self.answer_one: 6, self.add: 5,
            self.lose: 2, self.interrupt: 1, self.abort: 1, self.preempt: 1, self.reset: 1,
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

    def answer_one(self) -> str:
        """The items come in any order."""
        waits = [each for each in self.engine.pins.commands if each[0] == "pin_or_watch"]
        if not waits:
            return "answer nothing"
        command = self.chance.choice(waits)
        self.engine.pins.commands.remove(command)
        self.engine.comes(str(command[1]))
        return f"answer {str(command[1])[-1]}"

    def add(self) -> str:
        if len(self.live) >= MAX_LIVE:
            return "add nothing"
        items = self.chance.choices(ITEMS, k=self.chance.choice((0, 1, 1, 2, 3)))
        options: dict[str, Any] = {
            "rows": [ROWS[item] for item in items],
            "text": self.chance.choice(TEXTS if items else LONG_TEXTS),
            "max_tokens": self.chance.randint(1, 4),
            "prompt_logprobs": self.chance.choice((None, None, None, 1)),
            "token": self.chance.choice((TEXT, TEXT, TEXT + 1)),
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


def walk(engine: ParkingEngine, seed: int, *, is_slow: bool = False) -> None:
    each = Walk(engine, seed, is_slow=is_slow)
    try:
        each.run()
    except AssertionError as error:
        done = "\n  ".join(each.done)
        raise AssertionError(f"seed {seed}: {error}\nafter\n  {done}") from error


def check_who_gives_way(engine: ParkingEngine) -> None:
    """While vLLM schedules it preempts no request that runs, as long as a stalled one could give way."""
    scheduler = engine.scheduler
    schedule, preempt = scheduler.schedule, scheduler._preempt_request
    is_scheduling = False

    def checked_schedule(*args: Any) -> Any:
        nonlocal is_scheduling
        is_scheduling = True
        try:
            return schedule(*args)
        finally:
            is_scheduling = False

    def checked_preempt(request: Any, *args: Any, **kwargs: Any) -> None:
        stalled = [each for each in scheduler.running if each.request_id in scheduler._stalled]
        stalled = [each.request_id for each in stalled if scheduler.consumer.status(each.request_id).waits]
        is_stalled = request.request_id in scheduler._stalled
        assert not is_scheduling or is_stalled or not stalled, f"{stalled} should have given way"
        preempt(request, *args, **kwargs)

    scheduler.schedule, scheduler._preempt_request = checked_schedule, checked_preempt


def noted(owner: Any, name: str) -> list[Any]:
    """What the method is called with, first argument by first argument."""
    calls: list[Any] = []
    method = getattr(owner, name)

    def noting(first: Any, *args: Any) -> Any:
        calls.append(first)
        return method(first, *args)

    setattr(owner, name, noting)
    return calls


BOTH = pytest.mark.parametrize(
    ("scheduler_cls", "num_in_flight"), SCHEDULERS, ids=["one step", "two steps in flight"]
)


@BOTH
def test_no_wrong_token_is_sent_in_any_order(
    scheduler_cls: type[Any], num_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(NUM_WALKS):
        budget = SMALL_BUDGET if seed % 2 else BUDGET
        engine = ParkingEngine(
            monkeypatch, scheduler_cls, num_in_flight, budget=budget, num_blocks=FEW_BLOCKS
        )
        walk(engine, seed)


@BOTH
def test_no_wrong_token_is_sent_in_any_order_with_overlap(
    scheduler_cls: type[Any], num_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_begun = num_gave_way = 0
    for seed in range(NUM_OVERLAP_WALKS):
        chance = random.Random(seed)
        engine = ParkingEngine(
            monkeypatch,
            scheduler_cls,
            num_in_flight,
            budget=chance.choice((SMALL_BUDGET, BUDGET, 2 * BUDGET)),
            num_blocks=chance.choice((11, FEW_BLOCKS, 200)),
            max_num_seqs=chance.choice((2, 3, 8)),
            policy=chance.choice(("fcfs", "priority")),
            overlap=True,
            overlap_min_tokens=chance.choice((1, 1, 6)),
            overlap_share=chance.choice((0.5, 1.0)),
        )
        check_who_gives_way(engine)
        partial_preemption = engine.scheduler._preemption
        begun = noted(partial_preemption.partial, "begin")
        gave_way = noted(partial_preemption, "_preempt")
        walk(engine, seed, is_slow=True)
        assert len(partial_preemption.partial) == 0
        num_begun += len(begun)
        num_gave_way += len(gave_way)
    assert num_begun > NUM_OVERLAP_WALKS
    assert num_gave_way > NUM_OVERLAP_WALKS // 60
