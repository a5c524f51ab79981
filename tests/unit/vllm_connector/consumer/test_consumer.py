"""The consumer: an item from its admission to its release, and events that come late or for no request."""

import pytest

from tests.support.vllm_connector.fake_engine import (
    fake_request,
    metadata,
    pinned,
    sealed,
    watching,
    writer_lost,
)
from tests.support.vllm_connector.played_engine import IDLE, A, Engine
from triptych_common.domain.errors import IllegalTransitionError
from triptych_common.protocol.store import StoreFailure
from triptych_vllm_connector.consumer.consumer import PinReply
from triptych_vllm_connector.consumer.item_pins import EngineItemState


def test_the_whole_way_of_one_item(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.receives(metadata(A, ("wire-r1", 0)))
    assert not engine.consumer.admit_request(request, 0)
    assert engine.pins.take() == [("pin_or_watch", A)]
    assert engine.sender.take_short() == ["granted 0"]
    engine.consumer.on_parked("r1", 1)
    assert engine.replies(A, watching(A)) == []
    assert engine.receives(sealed(A, 7)) == ["r1"]
    assert engine.num_wakes == 3
    engine.consumer.on_unparked("r1", 2)
    assert engine.consumer.admit_request(request, 0)
    assert engine.loads(request, A) == [7]
    assert engine.consumer.item_state(A) is EngineItemState.RESIDENT
    assert engine.consumer.item_state(A) is not EngineItemState.PINNED
    assert engine.consumer.counts() == IDLE | {"requests": 1, "resident": 1, "preallocated_embeds": 4}
    engine.consumer.on_item_computed("r1", 0)
    assert engine.evicted == [A]
    assert engine.sender.take_short() == ["injected 0"]
    assert engine.consumer.counts() == IDLE | {"requests": 1}
    assert engine.consumer.admit_request(request, 20)  # decode steps
    engine.finish(request)
    assert engine.consumer.counts() == IDLE
    assert engine.pins.take() == []  # the pin is the worker's
    assert engine.sender.take_short() == []


def test_a_step_that_loads_what_is_not_pinned_is_refused(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    assert engine.consumer.item_state(A) is not EngineItemState.PINNED
    engine.consumer.admit_request(request, 0)
    assert engine.consumer.item_state(A) is not EngineItemState.PINNED
    with pytest.raises(IllegalTransitionError):
        engine.consumer.load_item("r1", A)


def test_requests_for_the_same_item_wake_in_the_order_of_coming(engine: Engine) -> None:
    requests = [fake_request(f"r{index}", [(A, 4)]) for index in range(8)]
    for request in requests:
        assert not engine.consumer.admit_request(request, 0)
    assert engine.pins.take() == [("pin_or_watch", A)]
    assert engine.replies(A, pinned(A, 1)) == [request.request_id for request in requests]


# ---- replies that come late -----------------------------------------------------------------------


def test_late_failures_do_not_fail_an_item_that_came_meanwhile(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.consumer.admit_request(request, 0)
    engine.replies(A, pinned(A, 1))
    engine.receives(
        writer_lost(A),
        PinReply(A, watching(A, writing=False)),
        PinReply(A, StoreFailure(seq=1, code="internal", detail="")),
    )
    assert not engine.consumer.status("r1").has_failed
    assert engine.sender.take_short() == []


def test_unknown_requests_are_harmless(engine: Engine) -> None:
    engine.consumer.on_item_computed("unknown", 0)
    engine.consumer.on_preempted("unknown")
    engine.consumer.on_parked("unknown", 1)
    engine.consumer.on_unparked("unknown", 1)
    assert not engine.consumer.status("unknown").has_failed
    assert engine.consumer.counts() == IDLE
