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
from tests.support.vllm_connector.played_engine import IDLE, A, B, Engine
from triptych_common.domain.errors import IllegalTransitionError, StoreUnavailableError
from triptych_common.protocol.store import Done, StoreFailure
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


def test_an_item_that_is_in_the_store_already_wakes_with_the_reply(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    assert not engine.consumer.admit_request(request, 0)
    assert engine.replies(A, pinned(A, 7)) == ["r1"]
    assert engine.consumer.admit_request(request, 0)


def test_a_request_wakes_when_the_last_of_its_items_is_there(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4), (B, 4)])
    engine.consumer.admit_request(request, 0)
    assert engine.pins.take() == [("pin_or_watch", A), ("pin_or_watch", B)]
    assert engine.replies(B, pinned(B, 1)) == []
    assert not engine.consumer.admit_request(request, 0)
    assert engine.replies(A, pinned(A, 2)) == ["r1"]
    assert engine.consumer.admit_request(request, 0)


def test_requests_for_the_same_item_wake_in_the_order_of_coming(engine: Engine) -> None:
    requests = [fake_request(f"r{index}", [(A, 4)]) for index in range(8)]
    for request in requests:
        assert not engine.consumer.admit_request(request, 0)
    assert engine.pins.take() == [("pin_or_watch", A)]
    assert engine.replies(A, pinned(A, 1)) == [request.request_id for request in requests]


# ---- replies that come late -----------------------------------------------------------------------
def test_a_pin_that_comes_after_the_release_is_given_back(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.consumer.admit_request(request, 0)
    engine.finish(request, 0)
    assert engine.pins.take() == [("pin_or_watch", A), ("unwatch", A)]
    engine.replies(A, pinned(A, 1))
    engine.receives(sealed(A, 2))
    assert engine.pins.take() == [("unpin", 1), ("unpin", 2)]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_two_pins_after_a_new_acquire_one_is_kept(engine: Engine, order: tuple[int, int]) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.consumer.admit_request(request, 0)
    engine.consumer.on_preempted("r1")
    engine.consumer.admit_request(request, 0)
    engine.pins.take()
    assert engine.replies(A, pinned(A, order[0])) == ["r1"]
    assert engine.replies(A, pinned(A, order[1])) == []
    assert engine.pins.take() == [("unpin", order[1])]
    engine.finish(request, 0)
    assert engine.pins.take() == [("unpin", order[0])]


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


def test_events_of_unknown_items_are_harmless(engine: Engine) -> None:
    engine.receives(writer_lost(A), PinReply(A, watching(A, writing=False)), PinReply(A, Done(seq=1)))
    assert engine.pins.take() == [("unwatch", A)]
    assert engine.sender.take_short() == []


def test_a_wake_up_for_a_request_that_has_ended_is_forgotten(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.consumer.admit_request(request, 0)
    engine.inbox.post_event(PinReply(A, StoreUnavailableError("gone")))
    engine.inbox.post_event(PinReply(A, pinned(A, 1)))
    engine.finish(request, 0)
    assert engine.consumer.drain_inbox() == []
    assert engine.consumer.take_failed() == set()
    assert engine.pins.take()[-1] == ("unpin", 1)


def test_unknown_requests_are_harmless(engine: Engine) -> None:
    engine.consumer.on_item_computed("unknown", 0)
    engine.consumer.on_preempted("unknown")
    engine.consumer.on_parked("unknown", 1)
    engine.consumer.on_unparked("unknown", 1)
    assert not engine.consumer.status("unknown").has_failed
    assert engine.consumer.counts() == IDLE
