"""Item pins: states of items, the requests that need them, commands to the store and orders to the worker."""

import pytest

from tests.support.vllm_connector.fake_engine import FakePinLink, descriptor, mm_hash
from triptych_vllm_connector.consumer.item_pins import ItemPins

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


class TestCopiesAhead:
    """A pinned item that waits for its request's other items is copied meanwhile."""

    @pytest.fixture(autouse=True)
    def pinned(self, pins: ItemPins) -> None:
        pins.acquire_item(A, "r1")
        pins.keep_pin(A, 7, descriptor(A))

    def test_an_item_that_no_step_loads_yet_is_started_once(self, pins: ItemPins) -> None:
        ((order,), drops) = pins.take_starts()
        assert (order.mm_hash, order.pin_id, drops) == (A, 7, [])
        assert pins.take_starts() == ([], [])
        pins.order_load(A, None)
        assert [each.pin_id for each in pins.take_load_orders()] == [7]
        pins.release_item(A, "r1")
        assert pins.take_starts() == ([], []), "the load took the copy"

    def test_an_item_that_this_step_loads_is_not_started(self, pins: ItemPins) -> None:
        pins.order_load(A, None)
        pins.take_load_orders()
        assert pins.take_starts() == ([], [])

    def test_an_item_that_ends_unloaded_is_dropped(self, bench: Bench, pins: ItemPins) -> None:
        pins.take_starts()
        pins.release_item(A, "r1")
        assert ("unpin", 7) in bench.link.take()
        assert pins.take_starts() == ([], [A])

    def test_a_load_that_is_withdrawn_is_dropped(self, bench: Bench, pins: ItemPins) -> None:
        pins.take_starts()
        pins.order_load(A, None)
        pins.release_item(A, "r1")  # preempted in the same pass
        assert pins.take_load_orders() == []
        assert pins.take_starts() == ([], [A])

    def test_a_store_that_is_gone_drops_what_was_started(self, pins: ItemPins) -> None:
        pins.take_starts()
        pins.lose_unloaded()
        assert pins.take_starts() == ([], [A])

    def test_a_new_pin_is_started_anew_behind_the_drop(self, pins: ItemPins) -> None:
        pins.take_starts()
        pins.release_item(A, "r1")
        pins.acquire_item(A, "r2")
        pins.keep_pin(A, 8, descriptor(A))
        ((order,), drops) = pins.take_starts()
        assert (order.pin_id, drops) == (8, [A])

    def test_an_item_of_the_slab_needs_no_copy(self, pins: ItemPins) -> None:
        pins.acquire_item(B, "r1")
        pins.keep_pin(B, 9, descriptor(B).model_copy(update={"memory": "cuda:GPU-0"}))
        starts, _ = pins.take_starts()
        assert [each.mm_hash for each in starts] == [A]
