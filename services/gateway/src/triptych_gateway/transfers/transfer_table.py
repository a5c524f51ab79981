"""Transfer table: state of each item's way to a store where some request needs it. Pure.

    WAITING --order--> ORDERED --completed--> HELD
       |  ^               |                    |
       |  `--failed, or silent for too long----'--needed again: evicted there
       `--the target has it, or its own encoder makes it--> HELD
    WAITING --attempts used up--> FAILED --another request needs it, or is asked for again--> WAITING

WAITING: no store is known to have it, or the next attempt is not due yet. One transfer for each item and
target, whatever the number of requests; a record lives while a request waits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from triptych_common.domain.transitions import check_transition
from triptych_common.protocol.ids import MmHash, RequestId

STALE_S = 1.0
"""Seconds after a retried order in which a target's `writer_lost` belongs to the failed one."""

TransferKey = tuple[MmHash, str]  # item, target store


class TransferState(StrEnum):
    WAITING = "waiting"
    ORDERED = "ordered"
    HELD = "held"
    FAILED = "failed"


ALLOWED: dict[TransferState, frozenset[TransferState]] = {
    TransferState.WAITING: frozenset({TransferState.ORDERED, TransferState.HELD, TransferState.FAILED}),
    TransferState.ORDERED: frozenset({TransferState.HELD, TransferState.WAITING}),
    TransferState.HELD: frozenset({TransferState.WAITING}),
    TransferState.FAILED: frozenset({TransferState.WAITING}),
}


class OrderReason(StrEnum):
    NEW = "new"  # an encoder makes it, or has just found it
    DIRECTORY = "directory"  # it was encoded before, for another store
    EVICTED = "evicted"  # the target had it, and has it no more
    RETRY = "retry"  # another transfer of it has failed


@dataclass(slots=True)
class Transfer:
    mm_hash: MmHash
    target: str
    state: TransferState = TransferState.WAITING
    transfer_id: str | None = None  # of the last order
    source: str | None = None  # of the last order
    reason: OrderReason = OrderReason.NEW  # of the last order, or of the next
    num_bytes: int = 0  # size, as known when it was ordered
    num_attempts: int = 0  # orders since it was last held
    is_missed: bool = False  # the target's prefill_decode lacks it, whatever the directory has
    is_looked_up: bool = False  # the directory was read again since the last order
    num_encodes: int = 0  # since it was last held, because no transfer succeeded
    tried: set[str] = field(default_factory=set)  # sources, since it was last held
    ordered_at: float = 0.0  # monotonic seconds
    due_at: float = float("inf")  # monotonic seconds. ORDERED: silence is a failure then; WAITING: try again
    num_extensions: int = 0  # of `due_at`, since the last order
    failure: str = ""  # kind of the last one
    request_ids: set[RequestId] = field(default_factory=set)

    @property
    def key(self) -> TransferKey:
        return self.mm_hash, self.target

    def loses_writer(self, now: float) -> bool:
        """Return whether the `writer_lost` that its target reports now is of the current order.

        If a current one is ignored, the source's agent reports `unreachable`.
        """
        is_stale = self.num_attempts > 1 and now - self.ordered_at < STALE_S
        return self.state is TransferState.ORDERED and not is_stale


def transition(transfer: Transfer, to: TransferState) -> None:
    """Move `transfer` to `to`. Nothing else assigns `transfer.state`.

    Raises:
        IllegalTransitionError: `to` cannot follow `transfer.state`.
    """
    if to is not transfer.state:
        check_transition(ALLOWED, f"transfer {transfer.mm_hash[:12]}", transfer.state, to)
        transfer.state = to


class ItemTransfers:
    """Records of transfers. Every method is one event; none does I/O. `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._transfers: dict[TransferKey, Transfer] = {}
        self._by_item: dict[MmHash, dict[str, Transfer]] = {}
        self._by_id: dict[str, Transfer] = {}  # of those that are ordered

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._transfers.values())

    def get(self, mm_hash: MmHash, target: str) -> Transfer | None:
        return self._transfers.get((mm_hash, target))

    def of_item(self, mm_hash: MmHash) -> list[Transfer]:
        return list(self._by_item.get(mm_hash, {}).values())

    def ordered(self, transfer_id: str) -> Transfer | None:
        """Return the transfer whose last order has this id, while it is under way."""
        return self._by_id.get(transfer_id)

    def join(self, mm_hash: MmHash, target: str, request_id: RequestId) -> Transfer:
        transfer = self._transfers.get((mm_hash, target))
        if transfer is None:
            transfer = self._transfers[mm_hash, target] = Transfer(mm_hash, target)
            self._by_item.setdefault(mm_hash, {})[target] = transfer
        transfer.request_ids.add(request_id)
        if transfer.state is TransferState.FAILED:
            self._begin_anew(transfer)
        return transfer

    def leave(self, request_id: RequestId, key: TransferKey) -> None:
        """Remove `request_id` from a transfer; a running order goes on, and its result is ignored."""
        transfer = self._transfers.get(key)
        if transfer is None:
            return
        transfer.request_ids.discard(request_id)
        if not transfer.request_ids:
            self._forget_order(transfer)
            del self._transfers[key]
            targets = self._by_item[transfer.mm_hash]
            del targets[transfer.target]
            if not targets:
                del self._by_item[transfer.mm_hash]

    def order(
        self, transfer: Transfer, transfer_id: str, source: str, num_bytes: int, now: float, due_at: float
    ) -> None:
        """Record the order to the agent of `source` to push the item."""
        transition(transfer, TransferState.ORDERED)
        transfer.transfer_id, transfer.source, transfer.num_bytes = transfer_id, source, num_bytes
        transfer.ordered_at, transfer.due_at, transfer.num_extensions = now, due_at, 0
        transfer.num_attempts += 1
        transfer.is_looked_up = False
        transfer.tried.add(source)
        self._by_id[transfer_id] = transfer

    def extend(self, transfer: Transfer, due_at: float) -> None:
        """Extend the time of an order whose agent lives."""
        transfer.due_at = due_at
        transfer.num_extensions += 1

    def hold(self, transfer: Transfer) -> None:
        """Record that the target has the item, or that its own encoder makes it there."""
        if transfer.state is TransferState.FAILED:
            self._begin_anew(transfer)
        self._forget_order(transfer)
        transition(transfer, TransferState.HELD)
        self._reset(transfer)

    def fail_attempt(self, transfer: Transfer, failure: str, retry_at: float) -> None:
        """Record a failed attempt; the next step is due at `retry_at`."""
        self._forget_order(transfer)
        transition(transfer, TransferState.WAITING)
        transfer.failure, transfer.due_at, transfer.reason = failure, retry_at, OrderReason.RETRY

    def give_up(self, transfer: Transfer) -> None:
        """Give a transfer up, since no attempt is left."""
        transition(transfer, TransferState.FAILED)
        transfer.due_at = float("inf")

    def need_again(self, transfer: Transfer) -> None:
        """Record that the target had the item, and lacks it now."""
        transition(transfer, TransferState.WAITING)
        self._reset(transfer)
        transfer.is_missed = True
        transfer.reason = OrderReason.EVICTED

    def made_again(self, transfer: Transfer, source: str) -> None:
        """Record that an encoder has the item at `source`, whatever was tried from there before."""
        transfer.tried.discard(source)

    @property
    def num_ordered(self) -> int:
        return len(self._by_id)

    def ordered_from(self, source: str) -> list[Transfer]:
        """Return running transfers whose last order went to the agent of `source`."""
        return [each for each in self._by_id.values() if each.source == source]

    def due(self, now: float) -> list[Transfer]:
        """Return transfers that are due: to be tried (again), or silent for too long."""
        return [each for each in self if each.due_at <= now]

    def next_due(self) -> float:
        """Return when the next transfer is due; infinite for none."""
        return min((each.due_at for each in self), default=float("inf"))

    def bytes_under_way(self, source: str, target: str) -> int:
        return sum(
            each.num_bytes for each in self._by_id.values() if each.source == source and each.target == target
        )

    def _begin_anew(self, transfer: Transfer) -> None:
        transition(transfer, TransferState.WAITING)
        self._reset(transfer)

    def _reset(self, transfer: Transfer) -> None:
        transfer.num_attempts = transfer.num_encodes = 0
        transfer.tried.clear()
        transfer.is_missed = False
        transfer.due_at, transfer.reason = float("inf"), OrderReason.NEW

    def _forget_order(self, transfer: Transfer) -> None:
        if transfer.transfer_id is not None:
            self._by_id.pop(transfer.transfer_id, None)
            transfer.transfer_id = None
