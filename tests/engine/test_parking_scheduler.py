"""Parking in front of vLLM's own schedulers, one step at a time and with two steps in flight.

EngineCore's own loop runs them; store, bus and worker are played. No engine is started.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import mm_hash
from tests.support.vllm_connector.parking_engine import SCHEDULERS, ParkingEngine
from tests.support.vllm_connector.parking_worker import BLOCK_SIZE, RIGHT
from triptych_vllm_connector.step_metadata import StepOrders

A, B = mm_hash("a"), mm_hash("b")
ROWS = 4
OVERDUE_S = 2.0  # more than what a request may wait, and the grace
Make = Callable[..., ParkingEngine]


@pytest.fixture(params=SCHEDULERS, ids=["one step", "two steps in flight"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Engines, of which nothing wrong is left in the end."""
    made: list[ParkingEngine] = []

    def make(**options: int) -> ParkingEngine:
        made.append(ParkingEngine(monkeypatch, *request.param, **options))
        return made[-1]

    yield make
    for each in made:
        each.check_idle()


@pytest.fixture
def engine(make: Make) -> ParkingEngine:
    return make(budget=ROWS)


# ---- parking -------------------------------------------------------------------------------------
def test_the_connector_learns_which_request_is_planned(
    engine: ParkingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks it for items by their names alone."""
    planned: list[str] = []
    monkeypatch.setattr(engine.scheduler.ec_connector, "plan_request", planned.append)
    engine.add("r1", A)
    engine.run()
    engine.run(A)
    assert "r1" in planned


def test_a_pinned_item_is_named_to_workers_while_its_request_waits_and_when_no_step_will_load_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU copies it meanwhile, beside the steps of other requests."""
    engine = make(budget=2 * ROWS)
    orders: list[StepOrders] = []
    execute = engine.worker.execute_model

    def noting(step: Any, *args: Any, **kwargs: Any) -> Any:
        orders.append(step.ec_connector_metadata)
        return execute(step, *args, **kwargs)

    monkeypatch.setattr(engine.worker, "execute_model", noting)
    engine.add("r1", A, B)
    engine.run()
    engine.comes(A)
    engine.add("text")
    engine.run()
    assert [order.mm_hash for step in orders for order in step.starts] == [A]
    engine.abort("r1")
    engine.add("more text")
    engine.run()
    assert [item for step in orders for item in step.drops] == [A]
    engine.check_idle()


def test_a_parked_request_costs_no_step(engine: ParkingEngine) -> None:
    engine.add("r1", A)
    assert engine.run() == 1
    assert engine.run() == 0
    assert engine.scheduler.make_stats().num_waiting_reqs == 1  # parked, and waiting for vLLM's metrics
    engine.comes(A)
    assert engine.scheduler.has_requests()
    assert engine.scheduler.make_stats().num_waiting_reqs == 1
    engine.run()
    assert engine.tokens == {"r1": [RIGHT, RIGHT]}


def test_a_running_request_that_waits_for_its_next_item_costs_no_step(engine: ParkingEngine) -> None:
    """Larger than the budget: it goes item by item."""
    request = engine.add("r1", A, B)
    engine.run()
    engine.comes(A)
    assert engine.run() == 2  # one that computes A, one that finds B missing
    assert request in engine.scheduler.running
    assert engine.run() == 0
    engine.comes(B)
    assert engine.scheduler.has_requests()
    engine.run()
    assert engine.tokens == {"r1": [RIGHT, RIGHT]}


def test_others_run_on_beside_a_stalled_request(engine: ParkingEngine) -> None:
    request = engine.add("r1", A, B)
    engine.run()
    engine.run(A)
    other = engine.add("r2", A)
    assert engine.scheduler.has_requests()
    engine.turn()
    assert other not in engine.scheduler.running  # waits for space, parked
    engine.add("r3")
    engine.run()
    assert engine.tokens["r3"] == [RIGHT, RIGHT]
    assert engine.run() == 0
    engine.abort("r1")
    assert request not in engine.scheduler.running
    engine.run(A)
    assert engine.tokens["r2"] == [RIGHT, RIGHT]


@pytest.mark.parametrize("state", ["queued", "parked", "stalled"])
def test_what_waits_is_ended_when_its_time_is_up(engine: ParkingEngine, state: str) -> None:
    engine.add("r1", *((A, B) if state == "stalled" else (A,)))
    if state != "queued":
        engine.run()
    if state == "stalled":
        engine.run(A)
    engine.clock.now_s += OVERDUE_S
    assert 1 <= engine.run() <= 3  # with two in flight one more is scheduled before the first is handled
    assert engine.ended == {"r1": "error"}


def test_what_computes_is_not_ended(engine: ParkingEngine) -> None:
    engine.add("r1", A, max_tokens=8)
    engine.run()
    engine.comes(A)
    engine.scheduler.has_requests()
    engine.turn()
    engine.clock.now_s += OVERDUE_S
    engine.run()
    assert engine.tokens == {"r1": [RIGHT] * 8}


# ---- loads that are lost -------------------------------------------------------------------------
@pytest.mark.parametrize("text", [1, BLOCK_SIZE, 2 * BLOCK_SIZE + 3])
def test_a_request_whose_load_is_lost_ends_before_a_token_is_sent(engine: ParkingEngine, text: int) -> None:
    """The item may be loaded in its first step, or in a later one than others are in flight of."""
    engine.worker.losing = {A}
    engine.add("r1", A, text=text)
    engine.run()
    engine.run(A)
    assert engine.tokens == {"r1": []}
    assert engine.ended == {"r1": "error"}
    assert "injected 0" not in engine.sender.take_short()
    engine.check_idle()
    engine.add("r2", A, text=text)  # finds nothing of it in the prefix cache
    engine.run()
    engine.run(A)
    assert engine.tokens["r2"] == [RIGHT, RIGHT]


def test_an_item_is_freed_with_the_output_of_the_step_that_loads_it(
    engine: ParkingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with that of the step before, and not later."""
    outputs: list[tuple[bool, bool]] = []  # (did its step load the item, is the item injected?)
    update = engine.scheduler.update_from_output

    def noted_update(step: Any, output: Any) -> Any:
        result = update(step, output)
        outputs.append((bool(step.ec_connector_metadata.loads), "injected 0" in engine.sender.take_short()))
        return result

    monkeypatch.setattr(engine.scheduler, "update_from_output", noted_update)
    engine.add("r1", A, text=BLOCK_SIZE, max_tokens=4)
    engine.run()
    engine.run(A)
    assert outputs.count((True, True)) == 1
    assert set(outputs) == {(False, False), (True, True)}


@pytest.mark.parametrize("text", [2, BLOCK_SIZE])
@pytest.mark.parametrize("leaves", ["aborted", "preempted", "preempted with all", "reset"])
def test_a_request_that_ends_before_a_lost_load_is_reported_leaves_no_wrong_block(
    engine: ParkingEngine, leaves: str, text: int
) -> None:
    request = engine.add("r1", A, text=text)
    engine.run()
    engine.comes(A)
    engine.worker.losing = {A}
    engine.worker.when_loading[A] = {
        "aborted": lambda: engine.abort("r1"),
        "preempted": lambda: engine.preempt_one(request),
        "preempted with all": engine.preempt,
        "reset": engine.reset_encoder_cache,
    }[leaves]
    engine.run()
    assert engine.tokens == {"r1": []}
    assert engine.ended == {"r1": "abort" if leaves == "aborted" else "error"}
    assert "injected 0" not in engine.sender.take_short()


def test_a_request_that_shares_a_lost_item_or_a_block_computed_from_it_ends_too(make: Make) -> None:
    engine = make(budget=2 * ROWS)
    engine.worker.losing = {A}
    for name in ("r1", "r2", "r3"):
        engine.add(name, A, text=BLOCK_SIZE)
    engine.add("r4", B, text=BLOCK_SIZE + 1)
    engine.run()
    engine.run(A, B)
    assert engine.tokens == {"r1": [], "r2": [], "r3": [], "r4": [RIGHT, RIGHT]}
    assert engine.ended == {"r1": "error", "r2": "error", "r3": "error", "r4": "length"}


def test_a_request_that_finds_a_block_computed_from_a_lost_item_ends_too(engine: ParkingEngine) -> None:
    """It comes while the step is in flight, holds nothing of the item, and runs on from its blocks."""
    engine.add("r1", A, text=BLOCK_SIZE)
    engine.run()
    engine.comes(A)
    engine.worker.losing = {A}
    engine.worker.when_loading[A] = lambda: engine.add("r2", A, text=BLOCK_SIZE)
    engine.run()
    if "r2" not in engine.ended:  # one step at a time: the blocks were gone before it was scheduled
        engine.run(A)
    assert engine.tokens["r1"] == []
    assert engine.tokens["r2"] in ([], [RIGHT, RIGHT])


def test_prompt_logprobs_of_a_lost_load_end_the_request_and_not_the_engine(engine: ParkingEngine) -> None:
    engine.add("r1", A, prompt_logprobs=1)
    engine.run()
    engine.comes(A)
    engine.worker.losing = {A}
    engine.run()
    assert engine.tokens == {"r1": []}
    assert engine.ended == {"r1": "error"}


def test_prompt_logprobs_that_are_right_are_sent(engine: ParkingEngine) -> None:
    engine.add("r1", A, prompt_logprobs=1)
    engine.run()
    engine.run(A)
    assert engine.tokens == {"r1": [RIGHT, RIGHT]}
    assert engine.num_prompt_logprobs == 1
