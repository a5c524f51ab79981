"""Item pins: states of items, the requests that need them, commands to the store and orders to the worker."""

import pytest

from tests.support.vllm_connector.fake_engine import FakePinLink, descriptor, mm_hash
from triptych_common.domain.errors import IllegalTransitionError
from triptych_vllm_connector.consumer.item_pins import (
    EngineItemState,
    ItemPins,
)

A, B = mm_hash("a"), mm_hash("b")


class Bench:
    """The store and vLLM's encoder cache around the item pins."""

    def __init__(self) -> None:
        self.link = FakePinLink()
        self.evicted: list[str] = []
        self.pins = ItemPins(self.link, self)

    def evict_item(self, mm_hash: str) -> None:
        self.evicted.append(mm_hash)

    def is_in_use(self, engine_request_id: str, item_index: int) -> bool:
        return False


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def pins(bench: Bench) -> ItemPins:
    return bench.pins


def test_the_store_is_asked_once_for_an_item_however_many_need_it(bench: Bench, pins: ItemPins) -> None:
    for engine_request_id in ("r1", "r1", "r2"):
        pins.acquire_item(A, engine_request_id)
    assert bench.link.take() == [("pin_or_watch", A)]
    assert pins.requests_of(A) == ("r1", "r2")


def test_an_item_is_ready_once_it_is_pinned(pins: ItemPins) -> None:
    assert pins.state_of(A) is None
    assert not pins.is_item_ready(A)
    pins.acquire_item(A, "r1")
    assert pins.state_of(A) is EngineItemState.WATCHING
    assert not pins.is_item_ready(A)
    assert pins.keep_pin(A, 7, descriptor(A))
    assert pins.state_of(A) is EngineItemState.PINNED
    assert pins.is_item_ready(A)


def test_load_hands_the_pin_over_once(pins: ItemPins) -> None:
    pins.acquire_item(A, "r1")
    pins.keep_pin(A, 7, descriptor(A))
    pins.order_load(A, "tp")
    (order,) = pins.take_load_orders()
    assert (order.mm_hash, order.pin_id, order.traceparent) == (A, 7, "tp")
    assert pins.state_of(A) is EngineItemState.RESIDENT
    assert pins.is_item_ready(A)
    with pytest.raises(IllegalTransitionError):
        pins.order_load(A, None)
    assert pins.take_load_orders() == []


def test_an_item_that_is_not_pinned_cannot_be_loaded(pins: ItemPins) -> None:
    with pytest.raises(IllegalTransitionError, match="absent"):
        pins.order_load(A, None)
    pins.acquire_item(A, "r1")
    with pytest.raises(IllegalTransitionError, match="WATCHING"):
        pins.order_load(A, None)


def test_a_second_pin_and_one_that_no_request_needs_are_given_back(bench: Bench, pins: ItemPins) -> None:
    assert not pins.keep_pin(A, 1, descriptor(A))
    pins.acquire_item(A, "r1")
    assert pins.keep_pin(A, 2, descriptor(A))
    assert not pins.keep_pin(A, 3, descriptor(A))
    pins.order_load(A, None)
    assert not pins.keep_pin(A, 4, descriptor(A))
    assert bench.link.take() == [("unpin", 1), ("pin_or_watch", A), ("unpin", 3), ("unpin", 4)]


def test_the_last_request_takes_the_item_with_it(bench: Bench, pins: ItemPins) -> None:
    pins.acquire_item(A, "r1")
    pins.acquire_item(A, "r2")
    for engine_request_id in ("stranger", "r1", "r1"):
        pins.release_item(A, engine_request_id)
    assert bench.link.take() == [("pin_or_watch", A)]
    pins.release_item(A, "r2")
    pins.release_item(A, "r2")
    assert bench.link.take() == [("unwatch", A)]
    assert pins.state_of(A) is None
    pins.acquire_item(A, "r3")  # anew
    assert bench.link.take() == [("pin_or_watch", A)]


def test_counts_are_by_state(pins: ItemPins) -> None:
    pins.acquire_item(A, "r1")
    pins.acquire_item(B, "r1")
    pins.keep_pin(B, 1, descriptor(B))
    assert [pins.count_items(state) for state in EngineItemState] == [1, 1, 0]


def test_a_lost_store_takes_everything_but_what_the_worker_has(pins: ItemPins) -> None:
    for index, name in enumerate("abc", start=1):
        pins.acquire_item(mm_hash(name), "r1")
        if name != "a":
            pins.keep_pin(mm_hash(name), index, descriptor(mm_hash(name)))
    pins.order_load(mm_hash("c"), None)
    assert sorted(item.mm_hash for item in pins.lose_unloaded()) == [A, B]
    assert [pins.count_items(state) for state in EngineItemState] == [0, 0, 1]
    assert pins.state_of(mm_hash("c")) is EngineItemState.RESIDENT


def test_an_order_is_orphaned_when_its_request_leaves_while_others_wait(bench: Bench, pins: ItemPins) -> None:
    for engine_request_id in ("r0", "r1", "r2", "r3"):
        pins.acquire_item(A, engine_request_id)
    bench.link.take()
    pins.release_item(A, "r0")  # none was asked to order it
    pins.note_order(A, "r1")
    assert bench.link.take() == []
    pins.release_item(A, "r1")
    assert bench.link.take() == [("pin_or_watch", A)]
    pins.release_item(A, "r2")  # the order was made again
    assert bench.link.take() == []


def test_an_order_that_was_fulfilled_is_never_orphaned(bench: Bench, pins: ItemPins) -> None:
    pins.acquire_item(A, "r1")
    pins.acquire_item(A, "r2")
    pins.note_order(A, "r1")
    pins.keep_pin(A, 1, descriptor(A))
    bench.link.take()
    pins.release_item(A, "r1")
    assert bench.link.take() == []
