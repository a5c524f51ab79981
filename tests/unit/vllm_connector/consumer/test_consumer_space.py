"""The consumer: space in the encoder cache, waited for, given back by preemption, and too small."""

from tests.support.vllm_connector.fake_engine import fake_request, metadata, mm_hash, pinned
from tests.support.vllm_connector.played_engine import IDLE, A, B, C, Engine
from triptych_vllm_connector.consumer.item_pins import EngineItemState


def test_a_request_without_space_waits_unpinned_and_is_woken_when_it_has_both() -> None:
    engine = Engine(budget=6)
    first, second = fake_request("r1", [(A, 4)]), fake_request("r2", [(B, 4)])
    engine.receives(metadata(B, ("wire-r2", 0)))
    engine.consumer.admit_request(first, 0)
    assert not engine.consumer.admit_request(second, 0)
    assert engine.pins.take() == [("pin_or_watch", A)]
    assert engine.sender.take_short() == []
    engine.finish(first)
    assert engine.pins.take() == [("unwatch", A), ("pin_or_watch", B)]
    assert engine.sender.take_short() == ["granted 0"]
    assert engine.replies(B, pinned(B, 1)) == ["r2"]


def test_a_request_that_gets_space_for_an_item_that_is_here_wakes_at_once() -> None:
    engine = Engine(budget=6)
    first = fake_request("r1", [(A, 4)])
    blocker = fake_request("r2", [(B, 6)])
    second = fake_request("r3", [(A, 4)])
    engine.consumer.admit_request(first, 0)
    engine.replies(A, pinned(A, 1))
    engine.consumer.admit_request(blocker, 0)
    assert not engine.consumer.admit_request(second, 0)
    engine.finish(blocker)
    assert engine.consumer.drain_inbox() == ["r3"]


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


def test_a_request_larger_than_the_budget_is_served_item_by_item() -> None:
    engine = Engine(budget=4)
    request = fake_request("r1", [(A, 4), (B, 4)])
    assert not engine.consumer.admit_request(request, 0)
    assert engine.pins.take() == [("pin_or_watch", A)]
    assert engine.replies(A, pinned(A, 1)) == ["r1"]
    assert engine.consumer.admit_request(request, 0)  # with its first item
    assert engine.loads(request, A) == [1]
    assert engine.consumer.item_state(B) is not EngineItemState.PINNED
    assert not engine.consumer.admit_request(request, 8)  # runs no further for now
    engine.consumer.on_item_computed("r1", 0)
    assert engine.pins.take() == [("pin_or_watch", B)]
    assert not engine.consumer.admit_request(request, 8)
    engine.replies(B, pinned(B, 2))
    assert engine.consumer.admit_request(request, 8)
    assert engine.loads(request, B) == [2]
    engine.consumer.on_item_computed("r1", 1)
    engine.finish(request)
    assert engine.consumer.counts() == IDLE


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


def test_an_oversized_request_whose_prefix_shrinks_while_it_waits_asks_again() -> None:
    engine = Engine(budget=4)
    request = fake_request("r1", [(A, 4), (B, 4), (C, 4)])
    assert not engine.consumer.admit_request(request, 8)
    assert engine.pins.take() == [("pin_or_watch", B)]
    assert engine.replies(B, pinned(B, 1)) == ["r1"]
    assert not engine.consumer.admit_request(request, 0)
    assert engine.pins.take() == [("unpin", 1), ("pin_or_watch", A)]
    assert engine.replies(A, pinned(A, 2)) == ["r1"]
    assert engine.consumer.admit_request(request, 0)


# ---- preemption -----------------------------------------------------------------------------------
def test_a_preempted_request_gives_everything_back_and_asks_anew(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4), (B, 4)])
    engine.consumer.admit_request(request, 0)
    engine.replies(A, pinned(A, 1))
    engine.replies(B, pinned(B, 2))
    assert engine.consumer.admit_request(request, 0)
    assert engine.loads(request, A) == [1]
    engine.pins.take()
    engine.consumer.on_preempted("r1")
    assert engine.evicted == [A]  # the worker ends its pin
    assert engine.pins.take() == [("unpin", 2)]
    assert engine.consumer.counts() == IDLE | {"requests": 1}
    assert not engine.consumer.admit_request(request, 0)
    assert engine.replies(A, pinned(A, 3)) == []
    assert engine.replies(B, pinned(B, 4)) == ["r1"]
    assert engine.consumer.admit_request(request, 0)
    engine.finish(request)
    assert engine.consumer.counts() == IDLE


def test_a_request_preempted_in_the_pass_that_scheduled_it_takes_its_load_back(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.consumer.admit_request(request, 0)
    engine.replies(A, pinned(A, 1))
    assert engine.consumer.admit_request(request, 0)
    engine.consumer.load_item("r1", A)
    engine.pins.take()
    engine.consumer.on_preempted("r1")
    assert engine.consumer.take_loads() == []
    assert engine.pins.take() == [("unpin", 1)]


def test_a_load_that_another_request_needs_too_is_not_taken_back(engine: Engine) -> None:
    first, second = fake_request("r1", [(A, 4)]), fake_request("r2", [(A, 4)])
    engine.consumer.admit_request(first, 0)
    engine.consumer.admit_request(second, 0)
    engine.replies(A, pinned(A, 1))
    engine.consumer.load_item("r1", A)
    engine.consumer.on_preempted("r1")
    assert [order.pin_id for order in engine.consumer.take_loads()] == [1]
    assert engine.evicted == []


def test_preempting_the_first_in_the_queue_lets_the_next_one_in() -> None:
    """The queue must not be forgotten with the one that stood at its head."""
    engine = Engine(budget=4)
    large = fake_request("large", [(A, 4), (B, 4)])
    waiting = fake_request("r1", [(C, 4)])
    engine.consumer.admit_request(large, 0)
    engine.replies(A, pinned(A, 1))
    assert engine.consumer.admit_request(large, 0)
    assert engine.loads(large, A) == [1]
    assert not engine.consumer.admit_request(waiting, 0)
    engine.pins.take()
    engine.consumer.on_preempted("large")
    assert engine.pins.take() == [("pin_or_watch", C)]
    assert engine.consumer.counts() == IDLE | {"requests": 2, "watching": 1, "preallocated_embeds": 4}


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
