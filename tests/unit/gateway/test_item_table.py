"""The item table: single flight, late and stale messages, no leftovers."""

import pytest

from triptych_common.domain.errors import IllegalTransitionError
from triptych_common.protocol.ids import JobId, MmHash, RequestId
from triptych_common.protocol.messages import FailureKind
from triptych_gateway.item_table import Item, ItemFailure, ItemState, ItemTable, transition
from triptych_gateway.sizes import ItemSizes

H = MmHash("a" * 64)
R1, R2 = RequestId("r1"), RequestId("r2")
J1, J2 = JobId("j1"), JobId("j2")
SIZES = ItemSizes(num_embeds=4, placeholder_metadata={"image_grid_thw": [1, 4, 4]})
BROKEN = ItemFailure(FailureKind.ENCODER_ERROR, "x")


@pytest.fixture
def table() -> ItemTable:
    return ItemTable()


def state(table: ItemTable) -> ItemState | None:
    item = table.get(H)
    return None if item is None else item.state


def test_the_whole_way(table: ItemTable) -> None:
    table.join(H, R1)
    assert table.order(H, J1, 10.0)
    assert state(table) is ItemState.SIZING
    assert table.size(H, SIZES, sealed=False) == {R1}
    assert state(table) is ItemState.SIZED
    assert table.seal(H) == {R1}
    assert state(table) is ItemState.SEALED
    table.leave(H, R1)
    assert len(table) == 0


def test_one_job_for_many_waiters(table: ItemTable) -> None:
    table.join(H, R1)
    assert table.order(H, J1, 10.0)
    table.join(H, R2)
    assert not table.order(H, J2, 10.0)
    assert table.size(H, SIZES, sealed=True) == {R1, R2}
    assert state(table) is ItemState.SEALED


def test_sizes_known_from_before_need_no_job(table: ItemTable) -> None:
    item = table.join(H, R1)
    table.recall(H, SIZES)
    assert (item.state, item.in_flight, item.sizes) == (ItemState.SIZED, False, SIZES)
    assert table.order(H, J1, 10.0)  # prefill_decode says that the store lacks it
    assert item.state is ItemState.SIZED


def test_evicted_after_sealed_is_ordered_again(table: ItemTable) -> None:
    table.join(H, R1)
    table.order(H, J1, 10.0)
    table.size(H, SIZES, sealed=True)
    assert table.order(H, J2, 10.0)
    assert state(table) is ItemState.SIZED


def test_failure_reaches_all_and_can_be_ordered_again(table: ItemTable) -> None:
    table.join(H, R1)
    table.join(H, R2)
    table.order(H, J1, 10.0)
    assert table.fail(H, J1, BROKEN) == {R1, R2}
    assert state(table) is ItemState.FAILED
    assert table.order(H, J2, 10.0)
    item = table.get(H)
    assert item is not None
    assert (item.state, item.num_attempts, item.failure) == (ItemState.SIZING, 2, None)


def test_stale_and_late_messages_are_harmless(table: ItemTable) -> None:
    assert table.size(H, SIZES, sealed=False) == frozenset()
    assert table.seal(H) == frozenset()
    assert table.fail(H, J1, BROKEN) == frozenset()
    table.leave(H, R1)
    table.join(H, R1)
    table.order(H, J1, 10.0)
    assert table.fail(H, J2, BROKEN) == frozenset()
    assert state(table) is ItemState.SIZING
    table.seal(H)
    table.seal(H)
    assert table.size(H, SIZES, sealed=False) == {R1}


def test_a_job_outlives_its_waiters_but_not_its_time(table: ItemTable) -> None:
    table.join(H, R1)
    table.order(H, J1, 10.0)
    table.leave(H, R1)
    assert len(table) == 1
    assert table.take_expired(9.0) == []
    assert table.take_expired(10.0) == [(H, J1)]
    assert table.fail(H, J1, BROKEN) == frozenset()
    assert len(table) == 0


def test_a_later_request_joins_the_job_that_was_left_alone(table: ItemTable) -> None:
    table.join(H, R1)
    table.order(H, J1, 10.0)
    table.leave(H, R1)
    table.join(H, R2)
    assert not table.order(H, J2, 20.0)
    assert table.size(H, SIZES, sealed=False) == {R2}


def test_forbidden_transition() -> None:
    with pytest.raises(IllegalTransitionError):
        transition(Item(H), ItemState.FAILED)
