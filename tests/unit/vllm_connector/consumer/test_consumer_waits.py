"""The consumer: how long it waits, what it encodes itself, and an encoder cache that is emptied under it."""

from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import FakeRequest, fake_request, pinned, whole_request
from tests.support.vllm_connector.played_engine import IDLE, A, B
from tests.support.vllm_connector.played_engine import Engine as PlayedEngine
from triptych_vllm_connector.consumer.deadlines import GRACE_S, RENEWED_WAIT_S
from triptych_vllm_connector.consumer.local_encode import LocalEncode
from triptych_vllm_connector.consumer.request_table import LONGEST_WAIT_S

REMAINING_S = 1.0  # of every fake request that came from a gateway


class Engine(PlayedEngine):
    """A consumer with a tower, and a clock that the test moves."""

    def __init__(self, budget: int = 100) -> None:
        tower = LocalEncode(lambda modality: {"image_grid_thw"})
        super().__init__(budget, encodes_request=tower.encodes_request)

    def passed(self) -> list[str]:
        return self.consumer.take_overdue()


@pytest.fixture
def engine() -> Engine:
    return Engine()


# ---- deadlines -----------------------------------------------------------------------------------
def test_a_request_may_wait_as_long_as_its_gateway_allows(engine: Engine) -> None:
    engine.consumer.on_request_added(fake_request("r1", [(A, 4)]))
    engine.now_s += REMAINING_S + GRACE_S - 0.01
    assert engine.passed() == []
    engine.now_s += 0.01
    assert engine.passed() == ["r1"]


def test_a_preempted_request_may_wait_anew(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.consumer.on_request_added(request)
    engine.consumer.admit_request(request, 0)
    engine.consumer.on_preempted("r1")
    engine.now_s += REMAINING_S + GRACE_S
    assert engine.passed() == []
    engine.now_s += RENEWED_WAIT_S
    assert engine.passed() == ["r1"]


def test_a_request_that_waits_again_after_its_time_does_not_wait_for_ever(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4), (B, 4)])
    engine.consumer.on_request_added(request)
    engine.consumer.admit_request(request, 0)
    engine.now_s += REMAINING_S + GRACE_S
    assert engine.passed() == ["r1"]  # it was running at that moment: the scheduler left it alone
    engine.consumer.on_parked("r1", 9)
    engine.now_s += RENEWED_WAIT_S
    assert engine.passed() == ["r1"]


@pytest.mark.parametrize(
    "request_", [fake_request("r", [(A, 1)], gateway=None), whole_request("r", [(A, 1)])]
)
def test_without_a_gateway_there_is_no_deadline(engine: Engine, request_: FakeRequest) -> None:
    engine.consumer.on_request_added(request_)
    assert len(engine.consumer._deadlines) == 0


def test_params_that_make_no_sense_set_no_deadline(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    assert request.ec_transfer_params is not None
    request.ec_transfer_params["remaining_ms"] = "soon"
    engine.consumer.on_request_added(request)
    assert len(engine.consumer._deadlines) == 0


@pytest.mark.parametrize(
    ("remaining_ms", "counted_s"), [("1000", 1.0), (1000.0, 1.0), (2**63, LONGEST_WAIT_S)]
)
def test_whatever_time_a_client_sends_ends_no_engine_and_no_alarm(
    engine: Engine, remaining_ms: Any, counted_s: float
) -> None:
    """A client of the HTTP port sends what JSON allows. `Alarm` cannot wait for 300 million years."""
    request = fake_request("r1", [(A, 4)])
    assert request.ec_transfer_params is not None
    request.ec_transfer_params["remaining_ms"] = remaining_ms
    engine.consumer.on_request_added(request)
    engine.now_s += counted_s + GRACE_S
    assert engine.passed() == ["r1"]


# ---- running requests that wait ------------------------------------------------------------------
def test_a_request_waits_from_its_refusal_until_it_is_woken() -> None:
    engine = Engine(budget=4)
    request = fake_request("r1", [(A, 4), (B, 4)])
    assert not engine.consumer.status("r1").waits
    engine.consumer.admit_request(request, 0)
    assert engine.consumer.status("r1").waits
    assert engine.replies(A, pinned(A, 1)) == ["r1"]
    assert not engine.consumer.status("r1").waits
    assert engine.consumer.admit_request(request, 0)
    engine.consumer.load_item("r1", A)
    engine.consumer.on_item_computed("r1", 0)  # and B gets the space
    engine.consumer.drain_inbox()
    assert not engine.consumer.admit_request(request, 10)
    assert engine.consumer.status("r1").waits
    assert engine.replies(B, pinned(B, 2)) == ["r1"]
    assert not engine.consumer.status("r1").waits


def test_a_failed_request_does_not_wait(engine: Engine) -> None:
    """Its end needs a step."""
    request = fake_request("r1", [(A, 4)])
    engine.consumer.admit_request(request, 0)
    engine.consumer.fail_overdue(request)
    engine.consumer.drain_inbox()
    assert not engine.consumer.admit_request(request, 0)
    assert not engine.consumer.status("r1").waits


# ---- encoded by this instance --------------------------------------------------------------------
def test_a_local_request_needs_space_and_no_tensor(engine: Engine) -> None:
    request = whole_request("r1", [("vllm's own hash", 4), (B, 4)])
    assert engine.consumer.admit_request(request, 0)
    assert engine.consumer.status("r1").is_local
    assert engine.consumer.status("r1").may_encode(1)
    assert engine.consumer.counts() == IDLE | {"requests": 1, "preallocated_embeds": 8}
    engine.consumer.load_item("r1", "vllm's own hash")
    assert engine.consumer.take_loads() == []
    engine.consumer.on_item_computed("r1", 0)
    assert engine.consumer.counts() == IDLE | {"requests": 1, "preallocated_embeds": 4}
    engine.consumer.on_finished(request, 1000)
    assert engine.consumer.counts() == IDLE
    assert (engine.pins.take(), engine.sender.take()) == ([], [])


def test_a_local_request_larger_than_the_budget_goes_item_by_item() -> None:
    engine = Engine(budget=4)
    request = whole_request("r1", [(A, 4), (B, 4)])
    assert engine.consumer.admit_request(request, 0)
    assert [engine.consumer.status("r1").may_encode(place) for place in (0, 1)] == [True, False]
    engine.consumer.on_item_computed("r1", 0)
    assert engine.consumer.status("r1").may_encode(1)


# ---- an encoder cache that is emptied ------------------------------------------------------------


def test_a_load_that_no_worker_saw_is_taken_back_with_the_view(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.consumer.admit_request(request, 0)
    engine.replies(A, pinned(A, 1))
    engine.consumer.load_item("r1", A)
    engine.consumer.on_cache_emptied()
    assert engine.consumer.take_loads() == []
    assert ("unpin", 1) in engine.pins.take()
