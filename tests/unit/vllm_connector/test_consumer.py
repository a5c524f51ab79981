"""The consumer: decide, pin, wait, wake, release. Fake store and bus; tests play the scheduler."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_engine import (
    INSTANCE,
    FakePinLink,
    FakeRequest,
    FakeTalkLink,
    descriptor,
    fake_request,
    metadata,
    mm_hash,
    pinned,
    sealed,
    watching,
    writer_lost,
)

from triptych_common.domain.errors import IllegalTransitionError, StoreUnavailableError
from triptych_common.protocol.messages import EncodeNeeded, ItemAck, Preallocation
from triptych_common.protocol.store import Done, Pinned, StoreFailure
from triptych_vllm_connector.consumer import Consumer, PinReply, StoreLost
from triptych_vllm_connector.lost_loads import undo
from triptych_vllm_connector.preallocator import make_preallocator

A, B, C = mm_hash("a"), mm_hash("b"), mm_hash("c")
IDLE = dict.fromkeys(("requests", "watching", "pinned", "resident", "pending", "preallocated_embeds"), 0)


class Engine:
    """A consumer and what surrounds it. `evicted` is what vLLM was told to drop."""

    def __init__(self, budget: int = 100, strategy: str = "sync") -> None:
        self.pins, self.talk = FakePinLink(), FakeTalkLink()
        self.evicted: list[str] = []
        self.num_wakes = 0
        self.consumer = Consumer(
            INSTANCE, self.pins, self.talk, make_preallocator(strategy, budget), lambda: 0
        )
        self.in_use: set[tuple[str, int]] = set()
        self.consumer.bind(self.evicted.append, lambda request_id, place: (request_id, place) in self.in_use)
        self.consumer.attach_waker(self._wake)

    def _wake(self) -> None:
        self.num_wakes += 1

    def hears(self, *heard: Any) -> list[str]:
        for each in heard:
            self.consumer.post(each)
        return self.consumer.drain()

    def replies(self, identifier: str, reply: Any) -> list[str]:
        return self.hears(PinReply(identifier, reply))

    def loads(self, request: FakeRequest, *identifiers: str) -> list[int]:
        """One step that schedules these items; the pins that went to the worker."""
        for identifier in identifiers:
            assert self.consumer.must_load(identifier)
            self.consumer.load(request.request_id, identifier)
        return [order.pin_id for order in self.consumer.take_loads()]

    def finish(self, request: FakeRequest, num_computed_tokens: int = 1000) -> None:
        self.consumer.finished(request, num_computed_tokens)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_the_whole_way_of_one_item(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.hears(metadata(A, ("wire-r1", 0)))
    assert not engine.consumer.admit(request, 0)
    assert engine.pins.take() == [("pin_or_watch", A)]
    assert engine.talk.words() == ["granted 0"]
    engine.consumer.parked("r1", 1)
    assert engine.replies(A, watching(A)) == []
    assert engine.hears(sealed(A, 7)) == ["r1"]
    assert engine.num_wakes == 3
    engine.consumer.unparked("r1", 2)
    assert engine.consumer.admit(request, 0)
    assert engine.loads(request, A) == [7]
    assert engine.consumer.is_resident(A)
    assert not engine.consumer.must_load(A)
    assert engine.consumer.counts() == IDLE | {"requests": 1, "resident": 1, "preallocated_embeds": 4}
    engine.consumer.computed("r1", 0)
    assert engine.evicted == [A]
    assert engine.talk.words() == ["injected 0"]
    assert engine.consumer.counts() == IDLE | {"requests": 1}
    assert engine.consumer.admit(request, 20)  # decode steps
    engine.finish(request)
    assert engine.consumer.counts() == IDLE
    assert engine.pins.take() == []  # the pin is the worker's
    assert engine.talk.words() == []


def test_a_step_that_loads_what_is_not_pinned_is_refused(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    assert not engine.consumer.must_load(A)
    engine.consumer.admit(request, 0)
    assert not engine.consumer.must_load(A)
    with pytest.raises(IllegalTransitionError):
        engine.consumer.load("r1", A)


def test_an_item_that_is_in_the_store_already_wakes_with_the_reply(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    assert not engine.consumer.admit(request, 0)
    assert engine.replies(A, pinned(A, 7)) == ["r1"]
    assert engine.consumer.admit(request, 0)


def test_a_request_wakes_when_the_last_of_its_items_is_there(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4), (B, 4)])
    engine.consumer.admit(request, 0)
    assert engine.pins.take() == [("pin_or_watch", A), ("pin_or_watch", B)]
    assert engine.replies(B, pinned(B, 1)) == []
    assert not engine.consumer.admit(request, 0)
    assert engine.replies(A, pinned(A, 2)) == ["r1"]
    assert engine.consumer.admit(request, 0)


def test_who_waits_for_the_same_item_wakes_in_the_order_of_coming(engine: Engine) -> None:
    requests = [fake_request(f"r{index}", [(A, 4)]) for index in range(8)]
    for request in requests:
        assert not engine.consumer.admit(request, 0)
    assert engine.pins.take() == [("pin_or_watch", A)]
    assert engine.replies(A, pinned(A, 1)) == [request.request_id for request in requests]


# ---- the prefix cache ----------------------------------------------------------------------------
def test_what_the_prefix_covers_is_declined_and_never_pinned(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4), (B, 4)])
    engine.hears(metadata(A, ("wire-r1", 0)), metadata(B, ("wire-r1", 1)))
    assert not engine.consumer.admit(request, 8)
    assert engine.pins.take() == [("pin_or_watch", B)]
    assert engine.talk.words() == ["declined 0", "skipped 0", "granted 1"]


def test_a_request_whose_items_are_all_covered_goes_at_once(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    assert engine.consumer.admit(request, 8)
    assert engine.pins.take() == []
    engine.hears(metadata(A, ("wire-r1", 0)))
    assert engine.talk.words() == ["declined 0", "skipped 0"]
    engine.finish(request)
    assert engine.consumer.counts() == IDLE


def test_a_prefix_that_shrank_makes_it_ask_again_as_a_whole(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4), (B, 4)])
    engine.hears(metadata(A, ("wire-r1", 0)))
    engine.consumer.admit(request, 8)
    engine.replies(B, pinned(B, 1))
    engine.pins.take(), engine.talk.take()
    assert not engine.consumer.admit(request, 0)
    assert engine.pins.take() == [("unpin", 1), ("pin_or_watch", A), ("pin_or_watch", B)]
    assert engine.talk.words() == ["granted 0"]  # `declined` is taken back
    assert engine.replies(A, pinned(A, 2)) == []
    assert engine.replies(B, pinned(B, 3)) == ["r1"]
    assert engine.consumer.admit(request, 0)


def test_a_prefix_that_grew_gives_back_what_it_covers(engine: Engine) -> None:
    """Nobody else would: vLLM says `computed` only of items that this request had in its cache."""
    request = fake_request("r1", [(A, 4), (B, 4)])
    engine.hears(metadata(A, ("wire-r1", 0)))
    engine.consumer.admit(request, 0)
    engine.replies(A, pinned(A, 1))
    assert engine.replies(B, pinned(B, 2)) == ["r1"]
    engine.pins.take(), engine.talk.take()
    assert engine.consumer.admit(request, 8)
    assert engine.pins.take() == [("unpin", 1)]
    assert engine.talk.words() == ["declined 0", "skipped 0"]
    assert engine.consumer.counts() == IDLE | {"requests": 1, "pinned": 1, "preallocated_embeds": 4}


def test_a_prefix_that_grew_over_everything_takes_it_out_of_the_queue() -> None:
    engine = Engine(budget=4)
    first, second, third = (fake_request(f"r{n}", [(h, 4)]) for n, h in enumerate((A, B, C)))
    for request in (first, second, third):
        assert not engine.consumer.admit(request, 0)
    assert engine.consumer.admit(second, 8)
    engine.finish(first)
    assert ("pin_or_watch", C) in engine.pins.take()  # the third does not wait behind the second


def test_an_item_that_is_being_computed_is_not_taken_from_under_the_step(engine: Engine) -> None:
    """With asynchronous scheduling `num_computed_tokens` is ahead of the worker."""
    request = fake_request("r1", [(A, 4), (B, 4)])
    engine.consumer.admit(request, 0)
    engine.replies(A, pinned(A, 1))
    engine.replies(B, pinned(B, 2))
    assert engine.consumer.admit(request, 0)
    assert engine.loads(request, A) == [1]
    engine.in_use = {("r1", 0)}
    assert engine.consumer.admit(request, 8)
    assert engine.evicted == []
    assert engine.consumer.is_resident(A)
    engine.consumer.computed("r1", 0)
    assert engine.evicted == [A]


def test_an_item_of_which_only_the_end_mark_is_not_covered_is_given_back_behind_it() -> None:
    """vLLM wants it to be there, but never reads it, and never says `computed`."""
    engine = Engine(budget=5)
    request = fake_request("r1", [(A, 3), (B, 5)])
    assert not engine.consumer.admit(request, 6)
    assert engine.replies(A, pinned(A, 1)) == ["r1"]
    assert engine.consumer.admit(request, 6)
    engine.pins.take()
    assert not engine.consumer.admit(request, 9)
    assert engine.pins.take() == [("unpin", 1), ("pin_or_watch", B)]


# ---- the same image twice, several requests ------------------------------------------------------
def test_an_image_that_stands_twice_is_held_until_its_last_place(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4), (B, 4), (A, 4)])
    engine.consumer.admit(request, 0)
    assert engine.pins.take() == [("pin_or_watch", A), ("pin_or_watch", B)]
    engine.replies(A, pinned(A, 1))
    engine.replies(B, pinned(B, 2))
    assert engine.consumer.admit(request, 0)
    assert engine.loads(request, A, B) == [1, 2]
    engine.consumer.computed("r1", 0)
    assert engine.evicted == []
    engine.consumer.computed("r1", 2)
    assert engine.evicted == [A]
    engine.consumer.computed("r1", 1)
    assert engine.evicted == [A, B]
    engine.finish(request)
    assert engine.consumer.counts() == IDLE


def test_a_shared_item_goes_with_its_last_holder(engine: Engine) -> None:
    first, second = fake_request("r1", [(A, 4)]), fake_request("r2", [(A, 4)])
    engine.consumer.admit(first, 0)
    engine.replies(A, pinned(A, 1))
    assert engine.consumer.admit(first, 0)
    assert engine.consumer.admit(second, 0)
    assert engine.loads(first, A) == [1]
    engine.finish(first)
    assert engine.evicted == []
    assert engine.consumer.admit(second, 0)
    engine.consumer.computed("r2", 0)
    assert engine.evicted == [A]
    engine.finish(second)
    assert engine.consumer.counts() == IDLE


def test_several_engine_requests_of_one_wire_request_do_not_speak_for_each_other(engine: Engine) -> None:
    first = fake_request("0_r", [(A, 4)], wire_id="wire")
    second = fake_request("1_r", [(A, 4)], wire_id="wire")
    engine.hears(metadata(A, ("wire", 0)))
    engine.consumer.admit(first, 0)
    engine.consumer.admit(second, 0)
    assert engine.talk.words() == ["granted 0"]
    engine.finish(first, 0)  # aborted
    assert engine.talk.words() == []  # the second needs it
    engine.replies(A, pinned(A, 1))
    assert engine.consumer.admit(second, 0)
    assert engine.loads(second, A) == [1]
    engine.consumer.computed("1_r", 0)
    assert engine.talk.words() == ["injected 0"]
    engine.finish(second)
    assert engine.talk.words() == []
    assert engine.consumer.counts() == IDLE


def test_the_last_of_several_declines_for_all(engine: Engine) -> None:
    requests = [fake_request(f"{n}_r", [(A, 4)], wire_id="wire") for n in range(2)]
    engine.hears(metadata(A, ("wire", 0)))
    for request in requests:
        engine.consumer.admit(request, 0)
    engine.talk.take()
    for request in requests:
        engine.finish(request, 0)
    assert engine.talk.words() == ["declined 0", "skipped 0"]


# ---- preemption ----------------------------------------------------------------------------------
def test_a_preempted_request_gives_everything_back_and_asks_anew(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4), (B, 4)])
    engine.consumer.admit(request, 0)
    engine.replies(A, pinned(A, 1))
    engine.replies(B, pinned(B, 2))
    assert engine.consumer.admit(request, 0)
    assert engine.loads(request, A) == [1]
    engine.pins.take()
    engine.consumer.preempted("r1")
    assert engine.evicted == [A]  # the worker ends its pin
    assert engine.pins.take() == [("unpin", 2)]
    assert engine.consumer.counts() == IDLE | {"requests": 1}
    assert not engine.consumer.admit(request, 0)
    assert engine.replies(A, pinned(A, 3)) == []
    assert engine.replies(B, pinned(B, 4)) == ["r1"]
    assert engine.consumer.admit(request, 0)
    engine.finish(request)
    assert engine.consumer.counts() == IDLE


def test_a_request_preempted_in_the_pass_that_scheduled_it_takes_its_load_back(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.consumer.admit(request, 0)
    engine.replies(A, pinned(A, 1))
    assert engine.consumer.admit(request, 0)
    engine.consumer.load("r1", A)
    engine.pins.take()
    engine.consumer.preempted("r1")
    assert engine.consumer.take_loads() == []
    assert engine.pins.take() == [("unpin", 1)]


def test_a_load_that_another_request_needs_too_is_not_taken_back(engine: Engine) -> None:
    first, second = fake_request("r1", [(A, 4)]), fake_request("r2", [(A, 4)])
    engine.consumer.admit(first, 0)
    engine.consumer.admit(second, 0)
    engine.replies(A, pinned(A, 1))
    engine.consumer.load("r1", A)
    engine.consumer.preempted("r1")
    assert [order.pin_id for order in engine.consumer.take_loads()] == [1]
    assert engine.evicted == []


def test_preempting_the_first_in_the_queue_lets_the_next_one_in() -> None:
    """The queue must not be forgotten with the one that stood at its head."""
    engine = Engine(budget=4)
    large = fake_request("large", [(A, 4), (B, 4)])
    waiting = fake_request("r1", [(C, 4)])
    engine.consumer.admit(large, 0)
    engine.replies(A, pinned(A, 1))
    assert engine.consumer.admit(large, 0)
    assert engine.loads(large, A) == [1]
    assert not engine.consumer.admit(waiting, 0)
    engine.pins.take()
    engine.consumer.preempted("large")
    assert engine.pins.take() == [("pin_or_watch", C)]
    assert engine.consumer.counts() == IDLE | {"requests": 2, "watching": 1, "preallocated_embeds": 4}


# ---- space ---------------------------------------------------------------------------------------
def test_a_request_without_space_waits_unpinned_and_is_woken_when_it_has_both() -> None:
    engine = Engine(budget=6)
    first, second = fake_request("r1", [(A, 4)]), fake_request("r2", [(B, 4)])
    engine.hears(metadata(B, ("wire-r2", 0)))
    engine.consumer.admit(first, 0)
    assert not engine.consumer.admit(second, 0)
    assert engine.pins.take() == [("pin_or_watch", A)]
    assert engine.talk.words() == []
    engine.finish(first)
    assert engine.pins.take() == [("unwatch", A), ("pin_or_watch", B)]
    assert engine.talk.words() == ["granted 0"]
    assert engine.replies(B, pinned(B, 1)) == ["r2"]


def test_a_request_that_gets_space_for_an_item_that_is_here_wakes_at_once() -> None:
    engine = Engine(budget=6)
    first = fake_request("r1", [(A, 4)])
    blocker = fake_request("r2", [(B, 6)])
    second = fake_request("r3", [(A, 4)])
    engine.consumer.admit(first, 0)
    engine.replies(A, pinned(A, 1))
    engine.consumer.admit(blocker, 0)
    assert not engine.consumer.admit(second, 0)
    engine.finish(blocker)
    assert engine.consumer.drain() == ["r3"]


def test_async_has_no_budget() -> None:
    engine = Engine(budget=1, strategy="async")
    for index in range(5):
        engine.consumer.admit(fake_request(f"r{index}", [(mm_hash(index), 1000)]), 0)
    assert engine.consumer.counts()["watching"] == 5
    assert engine.consumer.counts()["pending"] == 0


def test_an_item_larger_than_the_budget_fails_at_once_without_stopping_the_queue() -> None:
    engine = Engine(budget=6)
    request = fake_request("r1", [(A, 2), (B, 7)])
    engine.hears(metadata(A, ("wire-r1", 0)), metadata(B, ("wire-r1", 1)))
    assert not engine.consumer.admit(request, 0)
    assert engine.talk.words() == ["declined 1"]
    assert engine.consumer.has_failed("r1")
    assert engine.pins.take() == []
    assert not engine.consumer.admit(fake_request("r2", [(C, 6)]), 0)
    assert engine.pins.take() == [("pin_or_watch", C)]
    assert engine.consumer.take_failed() == {"r1"}
    assert engine.consumer.take_failed() == set()
    engine.finish(request, 0)
    assert engine.talk.words() == ["failed 0", "failed 1"]


def test_a_request_larger_than_the_budget_is_served_item_by_item() -> None:
    engine = Engine(budget=4)
    request = fake_request("r1", [(A, 4), (B, 4)])
    assert not engine.consumer.admit(request, 0)
    assert engine.pins.take() == [("pin_or_watch", A)]
    assert engine.replies(A, pinned(A, 1)) == ["r1"]
    assert engine.consumer.admit(request, 0)  # with its first item
    assert engine.loads(request, A) == [1]
    assert not engine.consumer.must_load(B)
    assert not engine.consumer.admit(request, 8)  # runs no further for now
    engine.consumer.computed("r1", 0)
    assert engine.pins.take() == [("pin_or_watch", B)]
    assert not engine.consumer.admit(request, 8)
    engine.replies(B, pinned(B, 2))
    assert engine.consumer.admit(request, 8)
    assert engine.loads(request, B) == [2]
    engine.consumer.computed("r1", 1)
    engine.finish(request)
    assert engine.consumer.counts() == IDLE


def test_an_oversized_request_with_one_image_at_both_ends_gets_through() -> None:
    engine = Engine(budget=4)
    request = fake_request("r1", [(A, 4), (B, 4), (A, 4)])
    computed = 0
    for step, identifier in enumerate((A, B, A)):
        engine.consumer.admit(request, computed)
        engine.replies(identifier, pinned(identifier, step + 1))
        assert engine.consumer.admit(request, computed)
        assert engine.loads(request, identifier) == [step + 1]
        computed = 8 * (step + 1)
        engine.consumer.computed("r1", step)
    assert engine.evicted == [A, B, A]
    engine.finish(request)
    assert engine.consumer.counts() == IDLE


def test_an_oversized_request_whose_prefix_shrinks_while_it_waits_asks_again() -> None:
    engine = Engine(budget=4)
    request = fake_request("r1", [(A, 4), (B, 4), (C, 4)])
    assert not engine.consumer.admit(request, 8)
    assert engine.pins.take() == [("pin_or_watch", B)]
    assert engine.replies(B, pinned(B, 1)) == ["r1"]
    assert not engine.consumer.admit(request, 0)
    assert engine.pins.take() == [("unpin", 1), ("pin_or_watch", A)]
    assert engine.replies(A, pinned(A, 2)) == ["r1"]
    assert engine.consumer.admit(request, 0)


# ---- replies that come late ----------------------------------------------------------------------
def test_a_pin_that_comes_after_the_release_is_given_back(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.consumer.admit(request, 0)
    engine.finish(request, 0)
    assert engine.pins.take() == [("pin_or_watch", A), ("unwatch", A)]
    engine.replies(A, pinned(A, 1))
    engine.hears(sealed(A, 2))
    assert engine.pins.take() == [("unpin", 1), ("unpin", 2)]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_two_pins_after_a_new_acquire_one_is_kept(engine: Engine, order: tuple[int, int]) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.consumer.admit(request, 0)
    engine.consumer.preempted("r1")
    engine.consumer.admit(request, 0)
    engine.pins.take()
    assert engine.replies(A, pinned(A, order[0])) == ["r1"]
    assert engine.replies(A, pinned(A, order[1])) == []
    assert engine.pins.take() == [("unpin", order[1])]
    engine.finish(request, 0)
    assert engine.pins.take() == [("unpin", order[0])]


def test_old_bad_news_do_not_hurt_an_item_that_came_meanwhile(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.consumer.admit(request, 0)
    engine.replies(A, pinned(A, 1))
    engine.hears(
        writer_lost(A),
        PinReply(A, watching(A, writing=False)),
        PinReply(A, StoreFailure(seq=1, code="internal", detail="")),
    )
    assert not engine.consumer.has_failed("r1")
    assert engine.talk.words() == []


def test_news_of_unknown_items_are_harmless(engine: Engine) -> None:
    engine.hears(writer_lost(A), PinReply(A, watching(A, writing=False)), PinReply(A, Done(seq=1)))
    assert engine.pins.take() == [("unwatch", A)]
    assert engine.talk.words() == []


# ---- nobody makes the item -----------------------------------------------------------------------
def test_an_absent_item_is_ordered_from_the_gateway(engine: Engine) -> None:
    engine.consumer.admit(fake_request("r1", [(B, 4), (A, 4)]), 0)
    engine.replies(A, watching(A, writing=False))
    (said,) = engine.talk.take()
    assert said == (
        "gateway-0",
        EncodeNeeded(request_id="wire-r1", item_index=1, mm_hash=A, prefill_decode=INSTANCE, reason="absent"),
    )


def test_an_item_whose_writer_is_lost_is_ordered_again(engine: Engine) -> None:
    engine.consumer.admit(fake_request("r1", [(A, 4)]), 0)
    engine.replies(A, watching(A))
    engine.hears(writer_lost(A))
    assert engine.talk.words() == ["encode needed 0"]
    assert engine.hears(sealed(A, 1)) == ["r1"]


def test_without_a_gateway_the_request_fails(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)], gateway=None)
    engine.consumer.admit(request, 0)
    assert engine.replies(A, watching(A, writing=False)) == ["r1"]
    assert not engine.consumer.admit(request, 0)
    assert engine.consumer.take_failed() == {"r1"}
    engine.finish(request, 0)
    assert engine.consumer.counts() == IDLE


def test_the_order_of_a_request_that_leaves_is_looked_after(engine: Engine) -> None:
    """A gateway ignores `EncodeNeeded` of a request that has ended; somebody else may wait for it."""
    first, second = fake_request("r1", [(A, 4)]), fake_request("r2", [(A, 4)])
    engine.consumer.admit(first, 0)
    engine.consumer.admit(second, 0)
    engine.replies(A, watching(A, writing=False))
    (said,) = engine.talk.take()
    assert isinstance(said[1], EncodeNeeded)
    assert said[1].request_id == "wire-r1"
    engine.pins.take()
    engine.finish(first, 0)
    assert engine.pins.take() == [("pin_or_watch", A)]  # is somebody writing it?
    engine.replies(A, watching(A, writing=False))
    (said,) = engine.talk.take()
    assert isinstance(said[1], EncodeNeeded)
    assert said[1].request_id == "wire-r2"


# ---- failures ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "reply",
    [
        StoreUnavailableError("gone"),
        StoreFailure(seq=1, code="internal", detail="broken"),
        Done(seq=1),
    ],
)
def test_a_store_that_refuses_fails_those_that_wait(engine: Engine, reply: object) -> None:
    waiting, other = fake_request("r1", [(A, 4)]), fake_request("r2", [(B, 4)])
    engine.hears(metadata(A, ("wire-r1", 0)))
    engine.consumer.admit(waiting, 0)
    engine.consumer.admit(other, 0)
    engine.talk.take()
    assert engine.replies(A, reply) == ["r1"]
    assert engine.consumer.take_failed() == {"r1"}
    engine.finish(waiting, 0)
    assert engine.talk.words() == ["failed 0"]
    assert not engine.consumer.has_failed("r2")


def test_a_lost_store_fails_all_but_those_whose_items_the_worker_has(engine: Engine) -> None:
    resident, holding, waiting = (fake_request(f"r{n}", [(h, 4)]) for n, h in enumerate((A, B, C)))
    for request in (resident, holding, waiting):
        engine.consumer.admit(request, 0)
    engine.replies(A, pinned(A, 1))
    engine.replies(B, pinned(B, 2))
    engine.loads(resident, A)
    engine.pins.take()
    assert engine.hears(StoreLost()) == ["r1", "r2"]
    assert engine.consumer.take_failed() == {"r1", "r2"}
    for request in (resident, holding, waiting):
        engine.finish(request, 0)
    assert engine.consumer.counts() == IDLE
    assert engine.pins.take() == []  # those pins are gone with the session


def test_a_lost_store_gives_its_space_to_those_in_the_queue() -> None:
    """They will be refused by the store, and fail too: none of them waits for ever."""
    engine = Engine(budget=4)
    first, second = fake_request("r1", [(A, 4)]), fake_request("r2", [(B, 4)])
    engine.consumer.admit(first, 0)
    engine.consumer.admit(second, 0)
    engine.pins.take()
    engine.hears(StoreLost())
    assert engine.pins.take() == [("pin_or_watch", B)]


def test_a_failed_request_holds_what_it_holds_until_vllm_ends_it(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4), (B, 4)])
    engine.consumer.admit(request, 0)
    engine.replies(A, pinned(A, 1))
    engine.replies(B, StoreUnavailableError("gone"))
    assert engine.consumer.counts() == IDLE | {"requests": 1, "pinned": 1, "preallocated_embeds": 4}
    engine.pins.take()
    engine.finish(request, 0)
    assert engine.pins.take() == [("unpin", 1)]
    assert engine.consumer.counts() == IDLE


def test_who_comes_after_a_refusal_asks_the_store_anew(engine: Engine) -> None:
    """Also while the request that was refused is not ended yet."""
    engine.consumer.admit(fake_request("r1", [(A, 4)]), 0)
    engine.replies(A, StoreFailure(seq=1, code="internal", detail=""))
    engine.pins.take()
    engine.consumer.admit(fake_request("r2", [(A, 4)]), 0)
    assert engine.pins.take() == [("pin_or_watch", A)]
    assert engine.replies(A, pinned(A, 1)) == ["r2"]


# ---- the end -------------------------------------------------------------------------------------
def abort_while_watching(engine: Engine, request: FakeRequest) -> list[tuple[str, Any]]:
    engine.consumer.admit(request, 0)
    return [("unwatch", A)]


def abort_while_pinned(engine: Engine, request: FakeRequest) -> list[tuple[str, Any]]:
    engine.consumer.admit(request, 0)
    engine.replies(A, pinned(A, 1))
    return [("unpin", 1)]


def abort_while_resident(engine: Engine, request: FakeRequest) -> list[tuple[str, Any]]:
    engine.consumer.admit(request, 0)
    engine.replies(A, pinned(A, 1))
    engine.loads(request, A)
    return []


@pytest.mark.parametrize("reach", [abort_while_watching, abort_while_pinned, abort_while_resident])
def test_an_abort_gives_everything_back(
    engine: Engine, reach: Callable[[Engine, FakeRequest], list[tuple[str, Any]]]
) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.hears(metadata(A, ("wire-r1", 0)))
    expected = reach(engine, request)
    engine.pins.take(), engine.talk.take()
    engine.finish(request, 0)
    assert engine.pins.take() == expected
    assert engine.talk.words() == ["declined 0", "skipped 0"]
    assert engine.consumer.counts() == IDLE
    engine.finish(request, 0)  # twice is harmless
    assert engine.consumer.counts() == IDLE


@pytest.mark.parametrize("is_metadata_first", [True, False])
def test_a_request_that_ends_before_it_was_ever_admitted_declines(
    engine: Engine, is_metadata_first: bool
) -> None:
    request = fake_request("r1", [(A, 4)])
    if is_metadata_first:
        engine.hears(metadata(A, ("wire-r1", 0)))
    engine.finish(request, 0)
    if not is_metadata_first:
        engine.hears(metadata(A, ("wire-r1", 0)))
    words = [message for _, message in engine.talk.take()]
    assert [type(word) for word in words] == [Preallocation, ItemAck]
    assert words[0].reason == "request_gone"  # type: ignore[attr-defined]
    assert engine.consumer.counts() == IDLE


def test_a_wake_up_for_a_request_that_has_ended_is_forgotten(engine: Engine) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.consumer.admit(request, 0)
    engine.consumer.post(PinReply(A, StoreUnavailableError("gone")))
    engine.consumer.post(PinReply(A, pinned(A, 1)))
    engine.finish(request, 0)
    assert engine.consumer.drain() == []
    assert engine.consumer.take_failed() == set()
    assert engine.pins.take()[-1] == ("unpin", 1)


def test_strangers_are_harmless(engine: Engine) -> None:
    engine.consumer.computed("nobody", 0)
    engine.consumer.preempted("nobody")
    engine.consumer.parked("nobody", 1)
    engine.consumer.unparked("nobody", 1)
    assert not engine.consumer.has_failed("nobody")
    assert engine.consumer.counts() == IDLE


def test_a_tensor_of_other_rows_fails_the_request_and_is_given_back(engine: Engine) -> None:
    request = fake_request("r1", [(A, 3)])
    assert not engine.consumer.admit(request, 0)
    other = Pinned(seq=1, pin_id=7, descriptor=descriptor(A, 4))
    assert engine.replies(A, other) == ["r1"]
    assert engine.consumer.take_failed() == {"r1"}
    assert not engine.consumer.must_load(A)
    engine.consumer.finished(request, 0)
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
    assert not engine.consumer.admit(request, 0)
    assert engine.consumer.take_failed() == {"r1"}
    engine.consumer.finished(request, 0)
    assert set(engine.consumer.counts().values()) == {0}


# ---- a tensor that the worker could not have -----------------------------------------------------
class FakeScheduler:
    """vLLM's, as far as `lost_loads.undo` looks: blocks of each request that runs, one group."""

    block_size = 4

    def __init__(self, blocks: dict[str, list[int]]) -> None:
        self.blocks = blocks
        self.running = [SimpleNamespace(request_id=request_id) for request_id in blocks]
        self.kv_cache_manager = self
        self.block_pool = SimpleNamespace(null_block=SimpleNamespace(block_id=0))
        self.evicted: set[int] = set()

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (self.blocks[request_id],)

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted = blocks


def test_a_lost_load_fails_who_waits_for_it_before_a_token_is_told(engine: Engine) -> None:
    one, other = fake_request("r1", [(A, 4)]), fake_request("r2", [(B, 4)])
    for number, (request, item) in enumerate(((one, A), (other, B))):
        engine.consumer.admit(request, 0)
        engine.replies(item, pinned(item, number + 1))
        assert engine.consumer.admit(request, 0)
        engine.loads(request, item)
    start = one.mm_features[0].mm_position.offset
    first_block = start // FakeScheduler.block_size
    scheduler = FakeScheduler({"r1": [0, 1, 2, 3], "r2": [0, 5, 6, 7], "r3": [0, 1, 2, 3]})
    output = SimpleNamespace(
        req_id_to_index={"r1": 0, "r2": 1, "r3": 2}, sampled_token_ids=[[11], [12], [13]]
    )

    undo(frozenset({A}), engine.consumer, scheduler, output)

    assert output.sampled_token_ids == [[], [12], []]
    assert scheduler.evicted == set([0, 1, 2, 3][first_block:]) - {0}
    assert engine.consumer.take_failed() == {"r1"}
    engine.consumer.computed("r1", 0)  # vLLM's word, before it ends the request
    engine.finish(one)
    assert engine.evicted == [A]
    assert "injected" not in [word for word in engine.talk.words() if word.endswith("r1")]
    engine.finish(other)
    assert engine.consumer.counts() == IDLE
