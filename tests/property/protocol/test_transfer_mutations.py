"""The model must notice when a rule of the transfers is taken out: each of these breaks it on purpose."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.property.protocol.test_protocol_mutations import Mutation, assert_noticed, nothing
from tests.property.protocol.test_transfer_model import FAR, SMALL, THREE
from tests.support.protocol_world.config import Config
from triptych_fabric.local_store import LocalStore
from triptych_fabric.receiver.peer import EntryInbox, FabricPeer
from triptych_fabric.receiver.reception import ByteBudget
from triptych_fabric.sender.link import EntryOutbox, OutgoingLink
from triptych_fabric.sender.transfers import TransferTable
from triptych_gateway.transfers import transfer_orders
from triptych_gateway.transfers.next_step import next_step
from triptych_gateway.transfers.transfer_orders import TransferOrders
from triptych_gateway.transfers.transfer_table import ItemTransfers


def _with(config: Config, *faults: str, num: int = 2) -> Config:
    """With fewer faults than there are attempts every caller has an answer."""
    return replace(config, faults=faults, max_faults=num)


def _compares_nothing(self: EntryInbox, number: int, sink: Any, digest: bytes) -> None:
    _END_ENTRY(self, number, sink, sink.checksum.digest())


def _answers_one(self: TransferTable, transfer: Any) -> Any:
    return _END(self, transfer)[:1]


def _tries_for_ever(*args: Any, max_attempts: int, **options: Any) -> Any:
    return next_step(*args, max_attempts=1 << 30, **options)


def _counts_no_failure(self: ItemTransfers, transfer: Any, *args: Any) -> None:
    _FAIL_ATTEMPT(self, transfer, *args)
    transfer.tried.clear()
    transfer.num_attempts = 0


def _waits_on(self: TransferOrders, transfer: Any, now: float) -> None:
    transfer.due_at = now + 5.0


@asynccontextmanager
async def _takes_for_good(
    self: ByteBudget, num_bytes: int, *args: Any, **options: Any
) -> AsyncIterator[None]:
    self.num_bytes += num_bytes
    yield


def _keeps_receptions(self: FabricPeer, error: Any) -> None:
    receptions, self._receptions = self._receptions, {}
    _ON_CLOSED(self, error)
    self._receptions = receptions


def _fails_no_offer(self: OutgoingLink, error: Any) -> None:
    offers, self._offers = self._offers, {}
    _LINK_CLOSED(self, error)
    self._offers = offers


def _drops_what_is_left(self: EntryInbox, number: int, failure: Any, on_gone: Any) -> None:
    """Its source is told nothing."""
    self._close_offer(number)
    self._loop.call_soon_threadsafe(on_gone)


_END = TransferTable._end
_END_ENTRY = EntryInbox.end_entry
_FAIL_ATTEMPT = ItemTransfers.fail_attempt
_ON_CLOSED, _LINK_CLOSED = FabricPeer.on_closed, OutgoingLink.on_closed

DAMAGED = _with(FAR, "damage", num=6)  # each time

MUTATIONS: dict[str, Mutation] = {
    # ---- the source's agent ----
    "a pin at the source is kept": Mutation(LocalStore, "release", nothing, FAR),
    "bytes that were sent are not given back": Mutation(EntryOutbox, "withdraw", nothing, FAR),
    "one of several orders is answered": Mutation(
        TransferTable, "_end", _answers_one, replace(THREE, shares_consumer=True)
    ),
    "a link that ends fails no offer": Mutation(
        OutgoingLink, "on_closed", _fails_no_offer, _with(FAR, "crash_agent", "cut_link")
    ),
    # ---- the target's ----
    "a reservation of what did not come is kept": Mutation(
        LocalStore, "cancel", nothing, _with(FAR, "cut_link", "damage"), fault_share=0.2
    ),
    "bytes are not compared": Mutation(
        EntryInbox, "end_entry", _compares_nothing, _with(FAR, "damage"), fault_share=0.3
    ),
    "a source that is gone keeps its offers": Mutation(
        FabricPeer, "on_closed", _keeps_receptions, _with(SMALL, "crash_agent", "cut_link")
    ),
    "a source is not told that its offer has failed": Mutation(
        EntryInbox, "drop", _drops_what_is_left, _with(FAR, "damage"), fault_share=0.3
    ),
    "what is received stays in the budget": Mutation(ByteBudget, "hold", _takes_for_good, FAR),
    # ---- the gateway ----
    "an agent that says nothing is waited for": Mutation(
        TransferOrders, "_on_no_answer", _waits_on, _with(FAR, "lose_transfer"), fault_share=0.2
    ),
    "transfers that failed are not counted": Mutation(
        ItemTransfers, "fail_attempt", _counts_no_failure, DAMAGED, fault_share=0.6
    ),
    "attempts have no end": Mutation(transfer_orders, "next_step", _tries_for_ever, DAMAGED, fault_share=0.6),
    "nothing is ordered": Mutation(TransferOrders, "_advance", nothing, FAR),
    "a request leaves its transfers behind": Mutation(ItemTransfers, "leave", nothing, FAR),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_model_notices_that(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_noticed(MUTATIONS[name], monkeypatch)
