"""The table of transfers: which states follow which, whose record lives how long, and what is due when."""

import pytest

from triptych_common.protocol.ids import MmHash, RequestId
from triptych_gateway.transfers.transfer_table import (
    ItemTransfers,
    OrderReason,
    Transfer,
    TransferState,
)

A, B = MmHash("a" * 64), MmHash("b" * 64)
R1, R2 = RequestId("r-1"), RequestId("r-2")
NEVER = float("inf")


@pytest.fixture
def table() -> ItemTransfers:
    return ItemTransfers()


def ordered(
    table: ItemTransfers, transfer_id: str = "t-1", source: str = "s", due_at: float = 9.0
) -> Transfer:
    transfer = table.join(A, "t", R1)
    table.order(transfer, transfer_id, source, 100, 1.0, due_at)
    return transfer


def test_one_transfer_for_an_item_and_a_target(table: ItemTransfers) -> None:
    first = table.join(A, "t", R1)
    assert table.join(A, "t", R2) is first
    assert table.join(A, "u", R1) is not first
    assert table.join(B, "t", R1) is not first
    assert [each.target for each in table.of_item(A)] == ["t", "u"]
    assert first.request_ids == {R1, R2}


def test_a_record_lives_while_a_request_waits(table: ItemTransfers) -> None:
    transfer = ordered(table)
    table.join(A, "t", R2)
    table.leave(R1, (A, "t"))
    assert table.ordered("t-1") is transfer
    table.leave(R2, (A, "t"))
    table.leave(R2, (A, "t"))
    assert table.ordered("t-1") is None
    assert (len(table), table.of_item(A), table.num_ordered, table.next_due()) == (0, [], 0, NEVER)


def test_an_order_is_known_by_its_id_until_it_ends(table: ItemTransfers) -> None:
    transfer = ordered(table)
    assert (transfer.state, transfer.num_attempts, transfer.tried) == (TransferState.ORDERED, 1, {"s"})
    assert table.ordered_from("s") == [transfer]
    assert table.bytes_under_way("s", "t") == 100
    assert table.bytes_under_way("s", "u") == 0
    table.fail_attempt(transfer, "unreachable", 5.0)
    assert table.ordered("t-1") is None
    assert (transfer.state, transfer.reason) == (TransferState.WAITING, OrderReason.RETRY)
    table.order(transfer, "t-2", "s2", 100, 6.0, 20.0)
    assert table.ordered("t-2") is transfer
    assert (transfer.num_attempts, transfer.tried) == (2, {"s", "s2"})


def test_what_is_due(table: ItemTransfers) -> None:
    transfer, other = ordered(table, due_at=9.0), table.join(B, "t", R1)
    assert table.due(8.9) == []
    assert table.due(9.0) == [transfer]
    table.fail_attempt(transfer, "silent", 12.0)
    assert (table.next_due(), other.due_at) == (12.0, NEVER)
    table.give_up(transfer)
    assert table.next_due() == NEVER


def test_held_starts_counting_anew(table: ItemTransfers) -> None:
    transfer = ordered(table)
    table.fail_attempt(transfer, "target_full", 2.0)
    transfer.num_encodes = 1
    table.hold(transfer)
    assert (transfer.num_attempts, transfer.num_encodes, transfer.tried) == (0, 0, set())
    assert transfer.due_at == NEVER
    table.need_again(transfer)
    assert (transfer.state, transfer.reason) == (TransferState.WAITING, OrderReason.EVICTED)


def test_another_request_begins_anew_where_one_was_given_up(table: ItemTransfers) -> None:
    transfer = ordered(table)
    table.fail_attempt(transfer, "refused", 2.0)
    table.give_up(transfer)
    table.join(A, "t", R2)
    assert (transfer.state, transfer.num_attempts) == (TransferState.WAITING, 0)
    table.give_up(transfer)
    table.hold(transfer)  # it came after all
    assert transfer.state is TransferState.HELD


def test_a_source_where_it_was_made_again_may_be_tried_again(table: ItemTransfers) -> None:
    transfer = ordered(table)
    table.made_again(transfer, "other")
    assert transfer.tried == {"s"}
    table.made_again(transfer, "s")
    assert transfer.tried == set()
