"""The consumer: items that no encoder makes, a store that refuses or is lost, requests without sense."""

from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import (
    INSTANCE,
    descriptor,
    fake_request,
    metadata,
    pinned,
    watching,
    writer_lost,
)
from tests.support.vllm_connector.played_engine import IDLE, A, B, C, Engine
from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.protocol.messages import EncodeNeeded
from triptych_common.protocol.store import Done, Pinned, StoreFailure
from triptych_vllm_connector.consumer.consumer import BusChanged, StoreLost
from triptych_vllm_connector.consumer.item_pins import EngineItemState


def test_an_absent_item_is_ordered_from_the_gateway(engine: Engine) -> None:
    engine.consumer.admit_request(fake_request("r1", [(B, 4), (A, 4)]), 0)
    engine.replies(A, watching(A, writing=False))
    (sent,) = engine.sender.take()
    assert sent == (
        "gateway-0",
        EncodeNeeded(request_id="wire-r1", item_index=1, mm_hash=A, prefill_decode=INSTANCE, reason="absent"),
    )


def test_without_a_gateway_the_request_fails(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)], gateway=None)
    engine.consumer.admit_request(request, 0)
    assert engine.replies(A, watching(A, writing=False)) == ["r1"]
    assert not engine.consumer.admit_request(request, 0)
    assert engine.consumer.take_failed() == {"r1"}
    engine.finish(request, 0)
    assert engine.consumer.counts() == IDLE


def test_an_order_that_redis_may_have_lost_is_sent_again_if_no_encoder_writes(engine: Engine) -> None:
    """No party repeats it by itself: the request would wait until its deadline."""
    engine.consumer.admit_request(fake_request("r1", [(A, 1), (B, 2)]), 0)
    engine.replies(A, watching(A, writing=False))
    engine.replies(B, watching(B, writing=True))
    engine.pins.take()
    engine.receives(BusChanged())
    assert engine.pins.take() == [("pin_or_watch", A)]  # B's job is checked by its gateway
    engine.replies(A, watching(A, writing=False))
    assert engine.sender.take_short() == ["encode needed 0"] * 2
    engine.receives(BusChanged())
    engine.replies(A, watching(A, writing=True))  # the order arrived, after all
    assert engine.sender.take_short() == []
    engine.replies(A, pinned(A, 1))
    engine.pins.take()
    engine.receives(BusChanged())
    assert engine.pins.take() == []


# ---- failures -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "reply",
    [StoreUnavailableError("gone"), StoreFailure(seq=1, code="internal", detail="broken"), Done(seq=1)],
)
def test_a_store_that_refuses_fails_those_that_wait(engine: Engine, reply: object) -> None:
    waiting, other = fake_request("r1", [(A, 4)]), fake_request("r2", [(B, 4)])
    engine.receives(metadata(A, ("wire-r1", 0)))
    engine.consumer.admit_request(waiting, 0)
    engine.consumer.admit_request(other, 0)
    engine.sender.take()
    assert engine.replies(A, reply) == ["r1"]
    assert engine.consumer.take_failed() == {"r1"}
    engine.finish(waiting, 0)
    assert engine.sender.take_short() == ["failed 0"]
    assert not engine.consumer.status("r2").has_failed


def test_a_lost_store_fails_all_but_those_whose_items_the_worker_has(engine: Engine) -> None:
    resident, holding, waiting = (fake_request(f"r{n}", [(h, 4)]) for n, h in enumerate((A, B, C)))
    for request in (resident, holding, waiting):
        engine.consumer.admit_request(request, 0)
    engine.replies(A, pinned(A, 1))
    engine.replies(B, pinned(B, 2))
    engine.loads(resident, A)
    engine.pins.take()
    assert engine.receives(StoreLost()) == ["r1", "r2"]
    assert engine.consumer.take_failed() == {"r1", "r2"}
    for request in (resident, holding, waiting):
        engine.finish(request, 0)
    assert engine.consumer.counts() == IDLE
    assert engine.pins.take() == []  # those pins are gone with the session


def test_a_lost_store_gives_its_space_to_those_in_the_queue() -> None:
    """They will be refused by the store, and fail too: none of them waits for ever."""
    engine = Engine(budget=4)
    first, second = fake_request("r1", [(A, 4)]), fake_request("r2", [(B, 4)])
    engine.consumer.admit_request(first, 0)
    engine.consumer.admit_request(second, 0)
    engine.pins.take()
    engine.receives(StoreLost())
    assert engine.pins.take() == [("pin_or_watch", B)]


def test_a_request_after_a_refusal_asks_the_store_anew(engine: Engine) -> None:
    """Also while the request that was refused is not ended yet."""
    engine.consumer.admit_request(fake_request("r1", [(A, 4)]), 0)
    engine.replies(A, StoreFailure(seq=1, code="internal", detail=""))
    engine.pins.take()
    engine.consumer.admit_request(fake_request("r2", [(A, 4)]), 0)
    assert engine.pins.take() == [("pin_or_watch", A)]
    assert engine.replies(A, pinned(A, 1)) == ["r2"]


def test_a_tensor_of_other_rows_fails_the_request_and_is_given_back(engine: Engine) -> None:
    request = fake_request("r1", [(A, 3)])
    assert not engine.consumer.admit_request(request, 0)
    other = Pinned(seq=1, pin_id=7, descriptor=descriptor(A, 4))
    assert engine.replies(A, other) == ["r1"]
    assert engine.consumer.take_failed() == {"r1"}
    assert engine.consumer.item_state(A) is not EngineItemState.PINNED
    engine.consumer.on_finished(request, 0)
    assert set(engine.consumer.counts().values()) == {0}


@pytest.mark.parametrize(
    ("identifier", "params"),
    [("cat-1", None), (A, {"request_id": ["x"]}), (A, {"request_id": "r", "gateway": "g", "surprise": 1})],
)
def test_a_request_that_makes_no_sense_fails_alone(
    engine: Engine, identifier: str, params: dict[str, Any] | None
) -> None:
    request = fake_request("r1", [(identifier, 3)])
    request.ec_transfer_params = params
    assert not engine.consumer.admit_request(request, 0)
    assert engine.consumer.take_failed() == {"r1"}
    engine.consumer.on_finished(request, 0)
    assert set(engine.consumer.counts().values()) == {0}


def test_what_follows_an_item_of_other_rows_is_not_granted(engine: Engine) -> None:
    """Its space ends with the request, and the store's answers for it concern no request any more."""
    first, second = fake_request("r1", [(A, 4)]), fake_request("r2", [(A, 6), (C, 4)])
    engine.consumer.admit_request(first, 0)
    engine.replies(A, Pinned(seq=1, pin_id=1, descriptor=descriptor(A, 4)))
    assert not engine.consumer.admit_request(second, 0)
    assert engine.consumer.take_failed() == {"r2"}
    engine.finish(second, 0)
    engine.replies(C, watching(C, writing=False))
    engine.receives(writer_lost(C))
    engine.finish(first, 0)
    assert engine.consumer.counts() == IDLE


def test_the_rest_of_a_request_that_other_rows_fail_is_not_granted_later() -> None:
    """It waited in the queue; the space that comes free goes to the next request."""
    engine = Engine(budget=10)
    first, second, third = (
        fake_request("r1", [(A, 4)]),
        fake_request("r2", [(A, 6), (B, 4), (C, 3)]),
        fake_request("r3", [(B, 4), (C, 3)]),
    )
    engine.consumer.admit_request(first, 0)
    engine.replies(A, Pinned(seq=1, pin_id=1, descriptor=descriptor(A, 4)))
    engine.consumer.admit_request(second, 0)
    engine.consumer.admit_request(third, 0)
    engine.finish(first, 0)
    engine.finish(second, 0)
    engine.replies(B, pinned(B, 2))
    engine.replies(C, pinned(C, 3))
    assert engine.consumer.admit_request(third, 0)
    engine.finish(third, 0)
    assert engine.consumer.counts() == IDLE
