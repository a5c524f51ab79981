"""The consumer: what the KV cache covers is neither asked for nor kept, also as the prefix changes."""

from tests.support.vllm_connector.fake_engine import fake_request, metadata, pinned
from tests.support.vllm_connector.played_engine import IDLE, A, B, C, Engine


def test_what_the_prefix_covers_is_declined_and_never_pinned(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4), (B, 4)])
    engine.receives(metadata(A, ("wire-r1", 0)), metadata(B, ("wire-r1", 1)))
    assert not engine.consumer.admit_request(request, 8)
    assert engine.pins.take() == [("pin_or_watch", B)]
    assert engine.sender.take_short() == ["declined 0", "skipped 0", "granted 1"]


def test_a_prefix_that_grew_gives_back_what_it_covers(engine: Engine) -> None:
    """vLLM would not: it reports as computed only items that this request had in its cache."""
    request = fake_request("r1", [(A, 4), (B, 4)])
    engine.receives(metadata(A, ("wire-r1", 0)))
    engine.consumer.admit_request(request, 0)
    engine.replies(A, pinned(A, 1))
    assert engine.replies(B, pinned(B, 2)) == ["r1"]
    engine.pins.take(), engine.sender.take()
    assert engine.consumer.admit_request(request, 8)
    assert engine.pins.take() == [("unpin", 1)]
    assert engine.sender.take_short() == ["declined 0", "skipped 0"]
    assert engine.consumer.counts() == IDLE | {"requests": 1, "pinned": 1, "preallocated_embeds": 4}


def test_a_prefix_that_grew_over_everything_takes_it_out_of_the_queue() -> None:
    engine = Engine(budget=4)
    first, second, third = (fake_request(f"r{n}", [(h, 4)]) for n, h in enumerate((A, B, C)))
    for request in (first, second, third):
        assert not engine.consumer.admit_request(request, 0)
    assert engine.consumer.admit_request(second, 8)
    engine.finish(first)
    assert ("pin_or_watch", C) in engine.pins.take()  # the third does not wait behind the second


def test_an_item_of_which_only_the_end_mark_is_not_covered_is_given_back_behind_it() -> None:
    """vLLM needs it to be there, but never reads it, and never reports it as computed."""
    engine = Engine(budget=5)
    request = fake_request("r1", [(A, 3), (B, 5)])
    assert not engine.consumer.admit_request(request, 6)
    assert engine.replies(A, pinned(A, 1)) == ["r1"]
    assert engine.consumer.admit_request(request, 6)
    engine.pins.take()
    assert not engine.consumer.admit_request(request, 9)
    assert engine.pins.take() == [("unpin", 1), ("pin_or_watch", B)]
