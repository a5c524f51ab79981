"""The item table: single flight, late and stale messages, no leftovers."""

import pytest

from triptych_common.domain.errors import IllegalTransitionError
from triptych_common.protocol.ids import JobId, MmHash, RequestId
from triptych_common.protocol.messages import FailureKind
from triptych_gateway.encode.item_table import Item, ItemFailure, ItemState, ItemTable, transition
from triptych_gateway.encode.sizes import ItemSizes

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
    assert table.order(H, J1)
    assert state(table) is ItemState.SIZING
    assert table.size(H, SIZES, sealed=False) == {R1}
    assert state(table) is ItemState.SIZED
    assert table.seal(H) == {R1}
    assert state(table) is ItemState.SEALED
    table.leave(H, R1)
    assert len(table) == 0


def test_one_job_for_many_waiters(table: ItemTable) -> None:
    table.join(H, R1)
    assert table.order(H, J1)
    table.join(H, R2)
    assert not table.order(H, J2)
    assert table.size(H, SIZES, sealed=True) == {R1, R2}
    assert state(table) is ItemState.SEALED


def test_sizes_known_from_before_need_no_job(table: ItemTable) -> None:
    item = table.join(H, R1)
    table.recall(H, SIZES)
    assert (item.state, item.in_flight, item.sizes) == (ItemState.SIZED, False, SIZES)
    assert table.order(H, J1)  # prefill_decode says that the store lacks it
    assert item.state is ItemState.SIZED


def test_evicted_after_sealed_is_ordered_again(table: ItemTable) -> None:
    table.join(H, R1)
    table.order(H, J1)
    table.size(H, SIZES, sealed=True)
    assert table.order(H, J2)
    assert state(table) is ItemState.SIZED


def test_failure_reaches_all_and_can_be_ordered_again(table: ItemTable) -> None:
    table.join(H, R1)
    table.join(H, R2)
    table.order(H, J1)
    assert table.fail(H, J1, BROKEN) == {R1, R2}
    assert state(table) is ItemState.FAILED
    assert table.order(H, J2)
    item = table.get(H)
    assert item is not None
    assert (item.state, item.num_attempts, item.failure) == (ItemState.SIZING, 2, None)


def test_stale_and_late_messages_are_harmless(table: ItemTable) -> None:
    assert table.size(H, SIZES, sealed=False) == frozenset()
    assert table.seal(H) == frozenset()
    assert table.fail(H, J1, BROKEN) == frozenset()
    table.leave(H, R1)
    table.join(H, R1)
    table.order(H, J1)
    assert table.fail(H, J2, BROKEN) == frozenset()
    assert state(table) is ItemState.SIZING
    table.seal(H)
    table.seal(H)
    assert table.size(H, SIZES, sealed=False) == {R1}


def test_nothing_is_kept_of_a_job_that_nobody_waits_for(table: ItemTable) -> None:
    """Whether it runs on is known to Redis, where who comes later asks."""
    table.join(H, R1)
    table.order(H, J1)
    table.leave(H, R1)
    assert len(table) == 0
    table.join(H, R2)
    assert table.order(H, J2)


def test_the_job_in_flight_is_the_one_that_redis_says(table: ItemTable) -> None:
    item = table.join(H, R1)
    table.order(H, J1)
    assert not item.is_claimed
    table.adopt(item, J2, 2)
    assert (item.job_id, item.num_attempts, item.is_claimed) == (J2, 2, True)
    assert table.fail(H, J1, BROKEN) == frozenset()
    assert table.fail(H, J2, BROKEN) == {R1}
    table.adopt(item, J1, 1)  # too late: it has ended
    assert not item.in_flight
    assert table.order(H, J1, retry_of=FailureKind.ENCODER_ERROR)
    assert (item.is_claimed, item.is_retry, item.num_attempts) == (False, True, 3)


def test_forbidden_transition() -> None:
    with pytest.raises(IllegalTransitionError):
        transition(Item(H), ItemState.FAILED)
