"""The item table: states, holders, orders."""

import pytest

from tests.support.fake_engine import descriptor, mm_hash
from triptych_common.domain.errors import IllegalTransitionError
from triptych_vllm_connector.consumer.item_table import ItemState, ItemTable

A, B = mm_hash("a"), mm_hash("b")


@pytest.fixture
def table() -> ItemTable:
    return ItemTable()


def test_the_store_is_asked_once_for_an_item_whoever_needs_it(table: ItemTable) -> None:
    assert table.acquire(A, "r1")
    assert not table.acquire(A, "r1")
    assert not table.acquire(A, "r2")
    assert table.holders(A) == ("r1", "r2")


def test_an_item_is_ready_once_it_is_pinned(table: ItemTable) -> None:
    assert table.state(A) is None
    assert not table.is_ready(A)
    table.acquire(A, "r1")
    assert table.state(A) is ItemState.WATCHING
    assert not table.is_ready(A)
    assert table.pinned(A, 7, descriptor(A))
    assert table.state(A) is ItemState.PINNED
    assert table.is_ready(A)


def test_load_hands_the_pin_over_once(table: ItemTable) -> None:
    table.acquire(A, "r1")
    table.pinned(A, 7, descriptor(A))
    order = table.load(A, "tp")
    assert (order.mm_hash, order.pin_id, order.traceparent) == (A, 7, "tp")
    assert table.state(A) is ItemState.RESIDENT
    assert table.is_ready(A)
    with pytest.raises(IllegalTransitionError):
        table.load(A)


def test_an_item_that_is_not_pinned_cannot_be_loaded(table: ItemTable) -> None:
    with pytest.raises(IllegalTransitionError, match="absent"):
        table.load(A)
    table.acquire(A, "r1")
    with pytest.raises(IllegalTransitionError, match="WATCHING"):
        table.load(A)


def test_a_second_pin_and_one_that_nobody_needs_are_not_taken(table: ItemTable) -> None:
    assert not table.pinned(A, 1, descriptor(A))
    table.acquire(A, "r1")
    assert table.pinned(A, 2, descriptor(A))
    assert not table.pinned(A, 3, descriptor(A))
    table.load(A)
    assert not table.pinned(A, 4, descriptor(A))


def test_the_last_holder_takes_the_item_with_it(table: ItemTable) -> None:
    table.acquire(A, "r1")
    table.acquire(A, "r2")
    assert table.release(A, "stranger") is None
    assert table.release(A, "r1") is None
    assert table.release(A, "r1") is None
    item = table.release(A, "r2")
    assert item is not None
    assert item.mm_hash == A
    assert table.release(A, "r2") is None
    assert len(table) == 0
    assert table.acquire(A, "r3")  # anew


def test_counts_are_by_state(table: ItemTable) -> None:
    table.acquire(A, "r1")
    table.acquire(B, "r1")
    table.pinned(B, 1, descriptor(B))
    assert [table.count(state) for state in ItemState] == [1, 1, 0]


def test_a_lost_store_takes_everything_but_what_the_worker_has(table: ItemTable) -> None:
    for index, name in enumerate("abc", start=1):
        table.acquire(mm_hash(name), "r1")
        if name != "a":
            table.pinned(mm_hash(name), index, descriptor(mm_hash(name)))
    table.load(mm_hash("c"))
    assert sorted(item.mm_hash for item in table.lose_unloaded()) == [A, B]
    assert len(table) == 1
    assert table.state(mm_hash("c")) is ItemState.RESIDENT


def test_an_order_is_orphaned_when_the_one_who_ordered_leaves_while_others_wait(table: ItemTable) -> None:
    table.acquire(A, "r1")
    table.acquire(A, "r2")
    assert not table.take_orphaned_order(A)  # nobody ordered
    table.ordered(A, "r1")
    assert not table.take_orphaned_order(A)  # it is still there
    table.release(A, "r1")
    assert table.take_orphaned_order(A)
    assert not table.take_orphaned_order(A)  # said once


def test_an_order_that_was_fulfilled_is_never_orphaned(table: ItemTable) -> None:
    table.acquire(A, "r1")
    table.acquire(A, "r2")
    table.ordered(A, "r1")
    table.pinned(A, 1, descriptor(A))
    table.release(A, "r1")
    assert not table.take_orphaned_order(A)
