"""Item table: state of each media item that some request waits for. Pure.

    UNKNOWN --order--> SIZING --metadata--> SIZED --completed--> SEALED
                          |                   |
                          `-----failed--------+--> FAILED

    shortcuts   UNKNOWN --recall (sizes known from before)--> SIZED
                any --metadata(sealed: the store has it already)--> SEALED
    once more   FAILED --order--> SIZING, or SIZED where the sizes are known
                SEALED --order (prefill_decode sent EncodeNeeded: evicted)--> SIZED

SIZED without a job: the sizes come from a cache, nothing was asked of an encoder. One job at a time
per item; any number of requests wait for it. The claim of the flight (`apply_claim`) decides whether it is
this gateway's job or another's. A record lives while a request waits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from triptych_common.domain.errors import RequestError
from triptych_common.domain.transitions import check_transition
from triptych_common.protocol.ids import JobId, MmHash, RequestId
from triptych_common.protocol.messages import FailureKind
from triptych_gateway.encode.sizes import ItemSizes


class ItemState(StrEnum):
    UNKNOWN = "unknown"
    SIZING = "sizing"
    SIZED = "sized"
    SEALED = "sealed"
    FAILED = "failed"


ALLOWED: dict[ItemState, frozenset[ItemState]] = {
    ItemState.UNKNOWN: frozenset({ItemState.SIZING, ItemState.SIZED, ItemState.SEALED}),
    ItemState.SIZING: frozenset({ItemState.SIZED, ItemState.SEALED, ItemState.FAILED}),
    ItemState.SIZED: frozenset({ItemState.SEALED, ItemState.FAILED}),
    ItemState.SEALED: frozenset({ItemState.SIZED}),
    ItemState.FAILED: frozenset({ItemState.SIZING, ItemState.SIZED, ItemState.SEALED}),
}


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """Reason why an item will not be made; `kind` None: the job could not even be published.

    `answer` is the caller's error where `kind` does not determine it.
    """

    kind: FailureKind | None
    detail: str
    answer: RequestError | None = None


@dataclass(slots=True)
class Item:
    mm_hash: MmHash
    state: ItemState = ItemState.UNKNOWN
    sizes: ItemSizes | None = None
    job_id: JobId | None = None  # the job in flight, if any
    is_claimed: bool = False  # Redis has this gateway's claim, and answered `job_id`
    retry_of: FailureKind | None = None  # the failure because of which it was ordered
    num_attempts: int = 0  # jobs since the last success, over all gateways as far as they are known
    failure: ItemFailure | None = None
    ordered_at: float = 0.0  # monotonic seconds: when the job in flight was ordered
    only_near: str | None = None  # the store whose encoders shall have that job, if it has any
    request_ids: set[RequestId] = field(default_factory=set)

    @property
    def in_flight(self) -> bool:
        return self.job_id is not None


def transition(item: Item, to: ItemState) -> None:
    """Move `item` to `to`. Nothing else assigns `item.state`.

    Raises:
        IllegalTransitionError: `to` cannot follow `item.state`.
    """
    if to is not item.state:
        check_transition(ALLOWED, f"item {item.mm_hash[:12]}", item.state, to)
        item.state = to


class ItemTable:
    """Owner of the records. Every method is one event; none does I/O."""

    def __init__(self) -> None:
        self._items: dict[MmHash, Item] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items.values())

    def get(self, mm_hash: MmHash) -> Item | None:
        return self._items.get(mm_hash)

    def join_item(self, mm_hash: MmHash, request_id: RequestId) -> Item:
        item = self._items.setdefault(mm_hash, Item(mm_hash))
        item.request_ids.add(request_id)
        return item

    def leave_item(self, mm_hash: MmHash, request_id: RequestId) -> None:
        """Record that `request_id` waits no more. Redis keeps the job's result for later requests."""
        item = self._items.get(mm_hash)
        if item is not None:
            item.request_ids.discard(request_id)
            self._drop_if_idle(item)

    def recall_sizes(self, mm_hash: MmHash, sizes: ItemSizes) -> None:
        item = self._items.get(mm_hash)
        if item is not None and item.sizes is None:
            item.sizes = sizes
            if item.state in (ItemState.UNKNOWN, ItemState.SIZING):
                transition(item, ItemState.SIZED)

    def order_item(
        self,
        mm_hash: MmHash,
        job_id: JobId,
        *,
        retry_of: FailureKind | None = None,
        only_near: str | None = None,
        now: float = 0.0,
    ) -> bool:
        """Record a job that is about to be ordered; return False if one is in flight already."""
        item = self._items.get(mm_hash)
        if item is None or item.in_flight:
            return False
        transition(item, ItemState.SIZING if item.sizes is None else ItemState.SIZED)
        item.job_id, item.ordered_at = job_id, now
        item.is_claimed, item.retry_of, item.only_near = False, retry_of, only_near
        item.num_attempts += 1
        item.failure = None
        return True

    def apply_claim(self, item: Item, job_id: JobId, attempt: int) -> None:
        if item.in_flight:
            item.job_id, item.num_attempts, item.is_claimed = job_id, attempt, True

    def set_sizes(self, mm_hash: MmHash, sizes: ItemSizes, *, sealed: bool) -> frozenset[RequestId]:
        """Record sizes from metadata of any job; return the requests that wait."""
        item = self._items.get(mm_hash)
        if item is None:
            return frozenset()
        item.sizes = sizes
        if sealed:
            return self.seal_item(mm_hash)
        if (item.in_flight and item.state is ItemState.SIZING) or item.state is ItemState.UNKNOWN:
            transition(item, ItemState.SIZED)
        return frozenset(item.request_ids)

    def seal_item(self, mm_hash: MmHash) -> frozenset[RequestId]:
        """Record that the tensor is in the store; return the requests that wait."""
        item = self._items.get(mm_hash)
        if item is None:
            return frozenset()
        if item.sizes is not None:  # completed before its metadata: those are on their way
            transition(item, ItemState.SEALED)
            item.failure = None
        item.job_id = None
        item.num_attempts = 0
        request_ids = frozenset(item.request_ids)
        self._drop_if_idle(item)
        return request_ids

    def fail_job(self, mm_hash: MmHash, job_id: JobId, failure: ItemFailure) -> frozenset[RequestId]:
        """Record a failed job; return the requests that wait, none for a job that is not in flight."""
        item = self._items.get(mm_hash)
        if item is None or item.job_id != job_id:
            return frozenset()
        transition(item, ItemState.FAILED)
        item.job_id = None
        item.failure = failure
        request_ids = frozenset(item.request_ids)
        self._drop_if_idle(item)
        return request_ids

    def _drop_if_idle(self, item: Item) -> None:
        if not item.request_ids:
            self._items.pop(item.mm_hash, None)
