"""The consumer: one image at several places, one item of several requests, several requests of one caller."""

from tests.support.vllm_connector.fake_engine import fake_request, metadata, pinned
from tests.support.vllm_connector.played_engine import IDLE, A, B, Engine


def test_an_image_that_stands_twice_is_held_until_its_last_place(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4), (B, 4), (A, 4)])
    engine.consumer.admit_request(request, 0)
    assert engine.pins.take() == [("pin_or_watch", A), ("pin_or_watch", B)]
    engine.replies(A, pinned(A, 1))
    engine.replies(B, pinned(B, 2))
    assert engine.consumer.admit_request(request, 0)
    assert engine.loads(request, A, B) == [1, 2]
    engine.consumer.on_item_computed("r1", 0)
    assert engine.evicted == []
    engine.consumer.on_item_computed("r1", 2)
    assert engine.evicted == [A]
    engine.consumer.on_item_computed("r1", 1)
    assert engine.evicted == [A, B]
    engine.finish(request)
    assert engine.consumer.counts() == IDLE


def test_several_engine_requests_of_one_request_do_not_count_for_each_other(engine: Engine) -> None:
    first = fake_request("0_r", [(A, 4)], request_id="wire")
    second = fake_request("1_r", [(A, 4)], request_id="wire")
    engine.receives(metadata(A, ("wire", 0)))
    engine.consumer.admit_request(first, 0)
    engine.consumer.admit_request(second, 0)
    assert engine.sender.take_short() == ["granted 0"]
    engine.finish(first, 0)  # aborted
    assert engine.sender.take_short() == []  # the second needs it
    engine.replies(A, pinned(A, 1))
    assert engine.consumer.admit_request(second, 0)
    assert engine.loads(second, A) == [1]
    engine.consumer.on_item_computed("1_r", 0)
    assert engine.sender.take_short() == ["injected 0"]
    engine.finish(second)
    assert engine.sender.take_short() == []
    assert engine.consumer.counts() == IDLE
