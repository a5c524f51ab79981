"""The consumer: space in the encoder cache, waited for, given back by preemption, and too small."""

from tests.support.vllm_connector.fake_engine import fake_request, metadata, mm_hash, pinned
from tests.support.vllm_connector.played_engine import IDLE, A, B, C, Engine


def test_async_has_no_budget() -> None:
    engine = Engine(budget=1, strategy="async")
    for index in range(5):
        engine.consumer.admit_request(fake_request(f"r{index}", [(mm_hash(index), 1000)]), 0)
    assert engine.consumer.counts()["watching"] == 5
    assert engine.consumer.counts()["pending"] == 0


def test_an_item_larger_than_the_budget_fails_at_once_without_stopping_the_queue() -> None:
    engine = Engine(budget=6)
    request = fake_request("r1", [(A, 2), (B, 7)])
    engine.receives(metadata(A, ("wire-r1", 0)), metadata(B, ("wire-r1", 1)))
    assert not engine.consumer.admit_request(request, 0)
    assert engine.sender.take_short() == ["declined 1"]
    assert engine.consumer.status("r1").has_failed
    assert engine.pins.take() == []
    assert not engine.consumer.admit_request(fake_request("r2", [(C, 6)]), 0)
    assert engine.pins.take() == [("pin_or_watch", C)]
    assert engine.consumer.take_failed() == {"r1"}
    assert engine.consumer.take_failed() == set()
    engine.finish(request, 0)
    assert engine.sender.take_short() == ["failed 0", "failed 1"]


def test_an_oversized_request_with_one_image_at_both_ends_gets_through() -> None:
    engine = Engine(budget=4)
    request = fake_request("r1", [(A, 4), (B, 4), (A, 4)])
    computed = 0
    for step, identifier in enumerate((A, B, A)):
        engine.consumer.admit_request(request, computed)
        engine.replies(identifier, pinned(identifier, step + 1))
        assert engine.consumer.admit_request(request, computed)
        assert engine.loads(request, identifier) == [step + 1]
        computed = 8 * (step + 1)
        engine.consumer.on_item_computed("r1", step)
    assert engine.evicted == [A, B, A]
    engine.finish(request)
    assert engine.consumer.counts() == IDLE


# ---- preemption -----------------------------------------------------------------------------------


def test_an_emptied_cache_keeps_no_request_from_its_next_item() -> None:
    """Served item by item: the step that reads A is in flight, and its end does not give A's space back."""
    engine = Engine(budget=4)
    request = fake_request("r1", [(A, 4), (B, 4)])
    engine.consumer.admit_request(request, 0)
    engine.replies(A, pinned(A, 1))
    engine.consumer.admit_request(request, 0)
    engine.loads(request, A)
    engine.in_use.add(("r1", 0))
    assert not engine.consumer.admit_request(request, 8)
    engine.in_use.clear()
    engine.consumer.on_cache_emptied()
    assert engine.receives() == ["r1"]
    assert not engine.consumer.admit_request(request, 8)
    assert engine.replies(B, pinned(B, 2)) == ["r1"]
    assert engine.consumer.admit_request(request, 8)
    engine.consumer.on_finished(request, 1000)
    assert engine.consumer.counts() == IDLE


def test_an_emptied_cache_wakes_none_that_holds_what_it_needs() -> None:
    engine = Engine()
    request = fake_request("r1", [(A, 4), (B, 4)])
    engine.consumer.admit_request(request, 0)
    engine.consumer.on_cache_emptied()
    assert engine.receives() == []
    assert engine.consumer.status("r1").waits
