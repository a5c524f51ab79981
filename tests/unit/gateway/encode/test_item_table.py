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


def test_sizes_known_from_before_need_no_job(table: ItemTable) -> None:
    item = table.join_item(H, R1)
    table.recall_sizes(H, SIZES)
    assert (item.state, item.in_flight, item.sizes) == (ItemState.SIZED, False, SIZES)
    assert table.order_item(H, J1)  # prefill_decode reports that the store lacks it
    assert item.state is ItemState.SIZED


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
    assert (item.is_claimed, item.retry_of is not None, item.num_attempts) == (False, True, 3)
