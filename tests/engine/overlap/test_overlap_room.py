"""Overlap in front of vLLM's own schedulers: what stalled requests hold, and how they end.

EngineCore's own loop runs them, one step at a time and with two in flight; store, bus and worker are played.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import mm_hash
from tests.support.vllm_connector.parking_engine import STEP_TOKENS, ParkingEngine
from tests.support.vllm_connector.parking_worker import BLOCK_SIZE, RIGHT
from triptych_vllm_connector.consumer import request_table

A, B, C = mm_hash("a"), mm_hash("b"), mm_hash("c")
ROWS = 4
OTHER = 9  # a token of other texts, which share no prefix
OVERDUE_S = 2.0  # more than what a request may wait, and the grace
Make = Callable[..., ParkingEngine]


# ---- room ------------------------------------------------------------------------------------------
def test_seats_of_incomplete_requests_are_bounded(make: Make) -> None:
    engine = make(max_num_seqs=4)
    for index, item in enumerate((A, B, C)):
        engine.add(f"r{index}", item, text=20)
    engine.run()
    assert engine.computed() == {"r0": 20, "r1": 20}
    engine.run(C)  # the third begins with all it needs
    assert engine.tokens["r2"] == [RIGHT, RIGHT]
    engine.comes(A)
    engine.comes(B)


def test_with_one_seat_nothing_begins_in_part(make: Make) -> None:
    engine = make(max_num_seqs=1)
    engine.add("r0", A, text=20)
    engine.run()
    engine.add("r1")
    engine.run()
    assert engine.tokens["r1"] == [RIGHT, RIGHT]
    engine.comes(A)


def test_blocks_of_incomplete_requests_are_bounded_but_for_a_single_one(make: Make) -> None:
    engine = make(num_blocks=13)
    engine.add("r0", A, text=3 * BLOCK_SIZE)  # 7 blocks, more than half of them
    engine.add("r1", B, text=1)
    engine.run()
    assert engine.computed() == {"r0": 3 * BLOCK_SIZE}
    engine.run(B)
    assert engine.tokens["r1"] == [RIGHT, RIGHT]
    engine.comes(A)


# ---- giving way ------------------------------------------------------------------------------------
def test_a_stalled_request_gives_way_to_one_that_can_run(make: Make) -> None:
    engine = make(num_blocks=10)
    engine.add("r0", A, text=3 * BLOCK_SIZE)  # 7 blocks, of which it holds 3
    engine.run()
    engine.add("r1", text=8 * BLOCK_SIZE, token=OTHER)
    engine.run()
    assert engine.tokens["r1"] == [RIGHT, RIGHT]
    assert engine.scheduler.requests["r0"].num_preemptions == 1
    engine.run()
    assert engine.computed() == {}  # it begins whole the next time
    engine.run(A)
    assert engine.tokens["r0"] == [RIGHT, RIGHT]


def test_it_does_not_give_way_where_that_helps_nobody(make: Make) -> None:
    engine = make(num_blocks=14)
    engine.add("r0", text=6 * BLOCK_SIZE, max_tokens=10, token=OTHER)
    engine.turn()
    engine.add("r1", A, text=1 * BLOCK_SIZE)
    engine.until(lambda: "r1" in engine.computed())
    engine.add("r2", text=7 * BLOCK_SIZE, token=OTHER + 1)
    while "r0" not in engine.ended:
        assert engine.has_work
        assert engine.scheduler.requests["r1"].num_preemptions == 0
        engine.turn()
    engine.run()
    assert engine.tokens["r2"] == [RIGHT, RIGHT]
    engine.comes(A)


def test_a_prefix_that_both_share_is_no_help(make: Make) -> None:
    """Its blocks are used by the waiting request itself, whoever else gives way."""
    engine = make(num_blocks=14)
    engine.add("r0", text=6 * BLOCK_SIZE, max_tokens=10, token=OTHER)
    engine.turn()
    first = engine.add("r1", A, text=2 * BLOCK_SIZE)
    engine.until(lambda: "r1" in engine.scheduler._stalled)
    engine.add("r2", text=8 * BLOCK_SIZE)  # two blocks are r1's, and five are free
    while "r0" not in engine.ended:
        assert engine.has_work
        assert first.num_preemptions == 0
        engine.turn()
    engine.run()
    assert engine.tokens["r2"] == [RIGHT, RIGHT]
    engine.comes(A)


def test_a_seat_is_made_for_one_that_can_run(make: Make) -> None:
    engine = make(max_num_seqs=2)
    engine.add("r0", A, text=20)
    engine.run()
    engine.add("r1", max_tokens=30)
    engine.turn()
    engine.add("r2")
    engine.until(lambda: "r2" in engine.ended)
    assert "r1" not in engine.ended
    assert engine.scheduler.requests["r0"].num_preemptions == 1
    engine.run()
    engine.run(A)
    assert engine.tokens["r0"] == [RIGHT, RIGHT]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_stalled_request_gives_way_before_any_that_runs(make: Make, policy: str) -> None:
    """Also when it came first, and is more important."""
    engine = make(num_blocks=10, policy=policy)
    first = engine.add("r0", A, text=3 * BLOCK_SIZE)
    first.priority = -1
    engine.run()
    engine.add("r1", text=4 * BLOCK_SIZE, max_tokens=3 * BLOCK_SIZE, token=OTHER)  # 4 blocks at first, then 7
    engine.run()
    assert engine.tokens["r1"] == [RIGHT] * 3 * BLOCK_SIZE
    assert first.num_preemptions == 1
    engine.run(A)
    assert engine.tokens["r0"] == [RIGHT, RIGHT]


# ---- ends ------------------------------------------------------------------------------------------
def test_a_stalled_request_ends_when_its_time_is_up(engine: ParkingEngine) -> None:
    engine.add("r1", A, text=20)
    engine.run()
    engine.clock.now_s += OVERDUE_S
    engine.run()
    assert engine.ended == {"r1": "error"}


def test_time_that_is_up_while_it_computes_in_front_of_a_missing_item_ends_it(engine: ParkingEngine) -> None:
    engine.add("r1", A, text=5 * STEP_TOKENS)
    engine.turn()
    engine.turn()
    engine.clock.now_s += OVERDUE_S
    engine.run()
    assert engine.ended == {"r1": "error"}


def test_a_wait_ends_when_its_request_is_preempted(
    engine: ParkingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[tuple[str, int]] = []

    def noted(name: str, start_ns: int, end_ns: int, *, attributes: dict[str, Any], **others: Any) -> None:
        spans.append((name, attributes.get("triptych.num_computed_tokens", 0)))

    monkeypatch.setattr(request_table, "record_span", noted)
    request = engine.add("r1", A, text=20)
    engine.run()
    engine.preempt_one(request)
    assert spans[-1] == ("prefill.wait", 20)
    engine.run()
    engine.answer_pins()
    engine.run()
    assert [name for name, _ in spans].count("prefill.wait") == 2


def test_a_session_that_waits_for_input_stops_no_step(engine: ParkingEngine) -> None:
    """Its first turn began in part, and is done."""
    session = engine.add("r1", A, text=20, max_tokens=1)
    session.resumable = True
    engine.run()
    engine.run(A)
    assert engine.tokens["r1"] == [RIGHT]
    engine.add("r2")
    engine.run()
    assert engine.tokens["r2"] == [RIGHT, RIGHT]
    engine.abort("r1")


def test_who_gave_way_has_no_more_time_than_before(make: Make) -> None:
    engine = make(num_blocks=10)
    engine.add("r0", A, text=3 * BLOCK_SIZE)
    engine.run()
    engine.add("r1", text=8 * BLOCK_SIZE, token=OTHER)
    engine.run()
    engine.clock.now_s += OVERDUE_S
    engine.run()
    assert engine.ended["r0"] == "error"


@pytest.mark.parametrize("leaves", ["abort", "preempt", "reset"])
def test_a_stalled_request_leaves_nothing(engine: ParkingEngine, leaves: str) -> None:
    request = engine.add("r1", A, B, text=20)
    engine.run()
    engine.run(A)
    if leaves == "abort":
        engine.abort("r1")
    elif leaves == "preempt":
        engine.preempt_one(request)
    else:
        engine.reset_encoder_cache()
    engine.run()
    engine.answer_pins()
    engine.run()
    engine.answer_pins()
    engine.run()
    assert engine.tokens["r1"] == ([] if leaves == "abort" else [RIGHT, RIGHT])


def test_a_lost_load_of_a_stalled_request_ends_it_alone(engine: ParkingEngine) -> None:
    engine.worker.losing = {A}
    engine.add("r1", A, B, text=20)
    engine.add("r2", B, text=20)
    engine.run()
    engine.run(A)
    assert engine.ended == {"r1": "error"}
    engine.run(B)
    assert engine.tokens == {"r1": [], "r2": [RIGHT, RIGHT]}
