"""The item table: single flight, late and stale messages, no leftovers."""

import pytest

from tests.support.item_records import item_record
from triptych_common.protocol.ids import JobId, MmHash, RequestId
from triptych_common.protocol.messages import FailureKind
from triptych_gateway.encode.item_table import ItemFailure, ItemState, ItemTable
from triptych_gateway.encode.sizes import ItemSizes

H = MmHash("a" * 64)
R1, R2 = RequestId("r1"), RequestId("r2")
J1, J2 = JobId("j1"), JobId("j2")
SIZES = ItemSizes(num_embeds=4, record=item_record(4, (1, 4, 4)))
BROKEN = ItemFailure(FailureKind.ENCODER_ERROR, "x")


@pytest.fixture
def table() -> ItemTable:
    return ItemTable()


def state(table: ItemTable) -> ItemState | None:
    item = table.get(H)
    return None if item is None else item.state


def test_the_whole_way(table: ItemTable) -> None:
    table.join_item(H, R1)
    assert table.order_item(H, J1)
    assert state(table) is ItemState.SIZING
    assert table.set_sizes(H, SIZES, sealed=False) == {R1}
    assert state(table) is ItemState.SIZED
    assert table.seal_item(H) == {R1}
    assert state(table) is ItemState.SEALED
    table.leave_item(H, R1)
    assert len(table) == 0


def test_sizes_known_from_before_need_no_job(table: ItemTable) -> None:
    item = table.join_item(H, R1)
    table.recall_sizes(H, SIZES)
    assert (item.state, item.in_flight, item.sizes) == (ItemState.SIZED, False, SIZES)
    assert table.order_item(H, J1)  # prefill_decode reports that the store lacks it
    assert item.state is ItemState.SIZED


def test_evicted_after_sealed_is_ordered_again(table: ItemTable) -> None:
    table.join_item(H, R1)
    table.order_item(H, J1)
    table.set_sizes(H, SIZES, sealed=True)
    assert table.order_item(H, J2)
    assert state(table) is ItemState.SIZED


def test_failure_reaches_all_and_can_be_ordered_again(table: ItemTable) -> None:
    table.join_item(H, R1)
    table.join_item(H, R2)
    table.order_item(H, J1)
    assert table.fail_job(H, J1, BROKEN) == {R1, R2}
    assert state(table) is ItemState.FAILED
    assert table.order_item(H, J2)
    item = table.get(H)
    assert item is not None
    assert (item.state, item.num_attempts, item.failure) == (ItemState.SIZING, 2, None)


def test_the_job_in_flight_is_the_one_that_redis_names(table: ItemTable) -> None:
    item = table.join_item(H, R1)
    table.order_item(H, J1)
    assert not item.is_claimed
    table.apply_claim(item, J2, 2)
    assert (item.job_id, item.num_attempts, item.is_claimed) == (J2, 2, True)
    assert table.fail_job(H, J1, BROKEN) == frozenset()
    assert table.fail_job(H, J2, BROKEN) == {R1}
    table.apply_claim(item, J1, 1)  # too late: it has ended
    assert not item.in_flight
    assert table.order_item(H, J1, retry_of=FailureKind.ENCODER_ERROR)
    assert (item.is_claimed, item.is_retry, item.num_attempts) == (False, True, 3)
