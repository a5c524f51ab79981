"""Overlap in front of vLLM's own schedulers: prompts run up to the first item that is not here.

EngineCore's own loop runs them, one step at a time and with two in flight; store, bus and worker are played.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import mm_hash, watching
from tests.support.vllm_connector.parking_engine import STEP_TOKENS, ParkingEngine
from tests.support.vllm_connector.parking_worker import BLOCK_SIZE, RIGHT
from triptych_vllm_connector.consumer.consumer import PinReply

A, B, C = mm_hash("a"), mm_hash("b"), mm_hash("c")
ROWS = 4
OTHER = 9  # a token of other texts, which share no prefix
OVERDUE_S = 2.0  # more than what a request may wait, and the grace
Make = Callable[..., ParkingEngine]


# ---- how far it runs -------------------------------------------------------------------------------
def test_a_prompt_runs_from_item_to_item(engine: ParkingEngine) -> None:
    engine.add("r1", A, B, text=3)  # 3 of text, A, 3 of text, B, 3 of text
    assert engine.run() == 1
    assert engine.computed() == {"r1": 3}
    assert engine.run() == 0  # stalled
    engine.run(A)
    assert engine.computed() == {"r1": 10}
    assert engine.run() == 0
    engine.run(B)
    assert engine.tokens == {"r1": [RIGHT, RIGHT]}


@pytest.mark.parametrize("text", [1, STEP_TOKENS - 1, STEP_TOKENS, STEP_TOKENS + 1, 3 * STEP_TOKENS])
def test_text_of_any_length_is_computed_before_its_image(engine: ParkingEngine, text: int) -> None:
    engine.add("r1", A, text=text)
    assert engine.run() == -(-text // STEP_TOKENS)
    assert engine.computed() == {"r1": text}
    engine.run(A)
    assert engine.tokens == {"r1": [RIGHT, RIGHT]}


def test_an_image_at_the_very_beginning_is_waited_for_in_the_parking(engine: ParkingEngine) -> None:
    engine.add("r1", A, B, text=0)
    engine.run()
    assert engine.computed() == {}
    engine.comes(B)
    assert engine.run() == 0
    engine.run(A)
    assert engine.tokens == {"r1": [RIGHT, RIGHT]}


def test_a_later_item_wakes_nobody(engine: ParkingEngine) -> None:
    engine.add("r1", A, B, C, text=2, rows=(4, 4, 4))
    engine.run()
    engine.comes(C)
    assert engine.run() == 0
    engine.comes(B)
    assert engine.run() == 0
    engine.run(A)
    assert engine.tokens == {"r1": [RIGHT, RIGHT]}


def test_the_same_image_twice_is_one_item(engine: ParkingEngine) -> None:
    engine.add("r1", A, B, A, text=2, rows=(4, 4, 4))
    engine.run()
    engine.run(A)
    assert engine.computed() == {"r1": 8}
    engine.run(B)
    assert engine.tokens == {"r1": [RIGHT, RIGHT]}


def test_an_image_larger_than_a_step_is_computed_in_parts(engine: ParkingEngine) -> None:
    engine.add("r1", A, B, text=2, rows=(3 * STEP_TOKENS, 4))
    engine.run()
    engine.run(A)
    assert engine.computed() == {"r1": 4 + 3 * STEP_TOKENS}
    engine.run(B)
    assert engine.tokens == {"r1": [RIGHT, RIGHT]}


def test_few_tokens_are_no_reason_for_a_step(make: Make) -> None:
    engine = make(overlap_min_tokens=6)
    engine.add("r1", A, B, text=5)
    engine.run()
    assert engine.computed() == {}
    engine.run(A)  # 5 of text, 4 of A, 5 of text
    assert engine.computed() == {"r1": 14}
    engine.run(B)
    assert engine.tokens == {"r1": [RIGHT, RIGHT]}


def test_a_short_text_waits_for_its_item_on_an_idle_engine_too(make: Make) -> None:
    engine = make(overlap_min_tokens=6)
    engine.add("r1", A, text=5, rows=(4,))
    engine.run()
    engine.inbox.post_event(PinReply(A, watching(A)))
    assert engine.run() == 0
    assert engine.computed() == {}
    engine.run(A)
    assert engine.tokens == {"r1": [RIGHT, RIGHT]}


def test_a_text_that_is_computed_early_is_cached_for_others(engine: ParkingEngine) -> None:
    engine.add("r1", A, text=2 * BLOCK_SIZE)
    engine.run()
    engine.add("r2", B, text=2 * BLOCK_SIZE, rows=(4,))
    engine.run()
    assert engine.scheduler.requests["r2"].prefill_stats.num_local_cached_tokens == 2 * BLOCK_SIZE or (
        engine.computed()["r1"] == 2 * BLOCK_SIZE
    )
    engine.run(B)
    assert engine.tokens["r2"] == [RIGHT, RIGHT]
    engine.run(A)
    assert engine.tokens["r1"] == [RIGHT, RIGHT]


def test_a_request_larger_than_the_budget_goes_from_item_to_item(make: Make) -> None:
    engine = make(budget=2 * ROWS)
    engine.add("r1", A, B, C, text=2, rows=(4, 4, 4))
    engine.run()
    assert engine.computed() == {"r1": 2}
    engine.run(A)
    assert engine.computed() == {"r1": 8}
    engine.run(B)
    assert engine.computed() == {"r1": 14}
    engine.run(C)
    assert engine.tokens == {"r1": [RIGHT, RIGHT]}


def test_an_encoder_cache_that_is_emptied_holds_up_no_item(make: Make) -> None:
    """It is emptied while the step that reads A is in flight: A's space goes to B all the same."""
    engine = make(budget=ROWS)
    engine.add("r1", A, B)
    engine.run()
    engine.worker.when_loading[A] = engine.reset_encoder_cache
    engine.run(A)
    for _ in range(3):
        engine.answer_pins()
        engine.run()
    assert engine.tokens == {"r1": [RIGHT, RIGHT]}


def test_off_nothing_runs_before_all_is_here(make: Make) -> None:
    engine = make(overlap=False)
    engine.add("r1", A, B, text=20)
    engine.run()
    engine.run(A)
    assert engine.computed() == {}
    engine.run(B)
    assert engine.tokens == {"r1": [RIGHT, RIGHT]}


# ---- what waiting costs ----------------------------------------------------------------------------
def test_views_of_computed_items_are_dropped_before_the_engine_sleeps(engine: ParkingEngine) -> None:
    """Else their pins would keep blocks of the store from the items that are waited for."""
    engine.add("r1", A, B)
    engine.run()
    engine.comes(A)
    assert engine.run() == 2  # one that computes A, one that gives its view back
    assert engine.worker.views == {}
    assert engine.run() == 0
    engine.comes(B)


def test_others_run_beside_a_stalled_request_which_is_not_asked_for_anew(engine: ParkingEngine) -> None:
    engine.add("r1", A, text=20)
    engine.run()
    num_asked = 0
    readiness = engine.consumer._grants.readiness

    def counted(*args: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        return readiness(*args)

    engine.consumer._grants.readiness = counted  # type: ignore[assignment, method-assign]
    engine.add("r2", max_tokens=20)
    assert engine.run() >= 20
    assert num_asked == 0
    assert engine.tokens["r2"] == [RIGHT] * 20
    engine.comes(A)


def test_a_stalled_request_stands_behind_those_that_run(engine: ParkingEngine) -> None:
    engine.add("r1", A, text=20)
    engine.run()
    engine.add("r2", max_tokens=40)
    engine.turn()
    engine.turn()
    assert list(engine.computed()) == ["r2", "r1"]
    engine.comes(A)
    engine.until(lambda: bool(engine.tokens["r1"]))
    engine.turn()
    if "r1" in engine.computed():
        assert list(engine.computed()) == ["r1", "r2"]  # its prompt is done: it came first
