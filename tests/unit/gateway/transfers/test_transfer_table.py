"""The table of transfers: one that was given up. Transfer orders and the model have the rest."""

from triptych_common.protocol.ids import MmHash, RequestId
from triptych_gateway.transfers.transfer_table import ItemTransfers, TransferState

A = MmHash("a" * 64)
R1, R2 = RequestId("r-1"), RequestId("r-2")


def test_another_request_begins_anew_where_one_was_given_up() -> None:
    table = ItemTransfers()
    transfer = table.join(A, "t", R1)
    table.order(transfer, "t-1", "s", 100, 1.0, 9.0)
    table.fail_attempt(transfer, "refused", 2.0)
    table.give_up(transfer)
    table.join(A, "t", R2)
    assert (transfer.state, transfer.num_attempts) == (TransferState.WAITING, 0)
    table.give_up(transfer)
    table.hold(transfer)  # it came after all
    assert transfer.state is TransferState.HELD
