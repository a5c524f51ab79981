"""Stalled requests and LoRA adapters, in vLLM's own schedulers: no step has more adapters than slots."""

from collections.abc import Callable

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.support.vllm_connector.fake_engine import mm_hash
from tests.support.vllm_connector.parking_engine import ParkingEngine
from tests.support.vllm_connector.parking_worker import RIGHT

A, B = mm_hash("a"), mm_hash("b")
FRENCH, DUTCH = 1, 2
DONE = [RIGHT, RIGHT]
Make = Callable[..., ParkingEngine]


def stalled(make: Make, max_loras: int) -> ParkingEngine:
    """`r0` has begun, and waits for its item with an adapter in its hands."""
    engine = make(max_loras=max_loras)
    engine.add("r0", A, text=20, adapter=FRENCH)
    engine.run()
    assert engine.computed() == {"r0": 20}
    return engine


def test_another_adapter_waits_for_the_slot_of_a_stalled_request(make: Make) -> None:
    engine = stalled(make, max_loras=1)
    engine.add("r1", adapter=DUTCH, max_tokens=20)
    assert engine.run() <= 2, "the engine steps while nothing can run"
    assert engine.tokens["r1"] == []
    engine.run(A)
    assert (engine.tokens["r0"], engine.tokens["r1"]) == (DONE, [RIGHT] * 20)


@pytest.mark.parametrize(("adapter", "max_loras"), [(DUTCH, 2), (FRENCH, 1), (0, 1)])
def test_others_do_not_wait_for_it(make: Make, adapter: int, max_loras: int) -> None:
    engine = stalled(make, max_loras)
    engine.add("r1", adapter=adapter)
    engine.run()
    assert engine.tokens["r1"] == DONE
    engine.run(A)
    assert engine.tokens["r0"] == DONE


def test_an_adapter_that_runs_besides_takes_one_slot(make: Make) -> None:
    engine = make(max_loras=2)
    engine.add("r0", max_tokens=40, adapter=FRENCH)
    engine.until(lambda: "r0" in engine.computed())
    engine.add("r1", A, text=20, adapter=FRENCH)
    engine.until(lambda: engine.computed().get("r1") == 20)
    engine.add("r2", adapter=DUTCH)
    engine.until(lambda: engine.tokens["r2"] == DONE)
    assert "r0" not in engine.ended
    engine.run(A)
    assert engine.tokens["r1"] == DONE


def test_the_slot_of_aborted_requests_is_free(make: Make) -> None:
    engine = stalled(make, max_loras=1)
    engine.add("r1", adapter=DUTCH)
    engine.add("r2", B, text=20, adapter=FRENCH)
    engine.run()
    engine.abort("r0")
    engine.run()
    assert engine.tokens["r1"] == [], "r2 still has the slot"
    engine.abort("r2")
    engine.run()
    assert engine.tokens["r1"] == DONE


def test_a_request_without_a_slot_ends_when_its_time_is_up(make: Make) -> None:
    engine = stalled(make, max_loras=1)
    overdue = engine.add("r1", B, text=20, adapter=DUTCH)
    engine.run(B)
    assert "r1" not in engine.ended
    engine.consumer.fail_overdue(overdue)
    engine.run()
    assert "r1" in engine.ended
    engine.run(A)
    assert engine.tokens["r0"] == DONE


def test_what_runs_goes_on_while_the_queue_is_paused(make: Make) -> None:
    engine = stalled(make, max_loras=1)
    engine.add("r1", max_tokens=5)
    engine.add("r2", adapter=DUTCH)
    engine.until(lambda: len(engine.tokens["r1"]) > 1)
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.run()
    assert len(engine.tokens["r1"]) == 5
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run(A)
    assert (engine.tokens["r0"], engine.tokens["r2"]) == (DONE, DONE)
