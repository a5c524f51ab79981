"""Preallocator: which requests may have space in the encoder cache, before their tensors exist. Pure.

The two-step bookkeeping has the field's names: space is `preallocate`d for a request as a whole, becomes
an allocation when vLLM schedules the item (`finalize_allocation`), and ends with `deallocate`, or with
`depreallocate` when the item was never scheduled. Whole requests only: two requests that each held half
of what the other needs would wait for ever. First come, first served: a large request is not overtaken.

A request that is larger than the whole budget is served item by item, and alone: when nobody else holds
space it gets the longest prefix of its items that fits, and the rest as it frees them. Alone, because it
runs with a part of its items: it holds KV blocks while it waits for space, and whoever held that space
could be waiting for its KV blocks.

`sync` keeps a budget in rows; `async` is the same interface without a budget.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Need:
    """One item at one place of one request."""

    mm_hash: str
    num_embeds: int  # rows
    item_index: int = 0  # position among the request's media items


class Preallocator(Protocol):
    """See the module docstring. `request_id` is vLLM's engine request id."""

    @property
    def num_embeds_used(self) -> int: ...

    @property
    def num_pending(self) -> int: ...

    def can_ever_hold(self, need: Need) -> bool: ...

    def can_preallocate(self, needs: Sequence[Need]) -> bool: ...

    def preallocate(self, request_id: str, needs: Sequence[Need]) -> list[Need]: ...

    def is_pending(self, request_id: str) -> bool: ...

    def take_granted(self) -> list[tuple[str, list[Need]]]: ...

    def finalize_allocation(self, mm_hash: str) -> None: ...

    def depreallocate(self, request_id: str) -> None: ...

    def deallocate(self, request_id: str, mm_hash: str) -> None: ...


@dataclass
class _Hold:
    num_embeds: int
    request_ids: set[str]
    allocated: bool = False


class SyncPreallocator:
    """Budgeted. `budget_embeds` rows in all; None means without bound (see `AsyncPreallocator`)."""

    def __init__(self, budget_embeds: int | None) -> None:
        self._budget = budget_embeds
        self._holds: dict[str, _Hold] = {}
        self._used = 0
        self._pending: OrderedDict[str, tuple[Need, ...]] = OrderedDict()

    @property
    def num_embeds_used(self) -> int:
        return self._used

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def is_pending(self, request_id: str) -> bool:
        """Does the request queue up for space, for all of its items or for the rest of them?"""
        return request_id in self._pending

    def can_ever_hold(self, need: Need) -> bool:
        return self._budget is None or need.num_embeds <= self._budget

    def can_preallocate(self, needs: Sequence[Need]) -> bool:
        """Is there space now for all of `needs`? Items that are held already cost nothing."""
        return len(self._fitting(needs)) == len(needs)

    def preallocate(self, request_id: str, needs: Sequence[Need]) -> list[Need]:
        """Grant what may be granted now; the request queues up for the rest.

        A request that waits already asks anew: `needs` replace what it waited for, its place is kept.
        Returns the granted needs: all of them, or, for a request larger than the budget, a prefix;
        or none, and `take_granted` names the request later.
        """
        is_first = not self._pending or next(iter(self._pending)) == request_id  # nobody overtakes
        granted = self._grant(request_id, needs) if is_first else []
        rest = tuple(needs[len(granted) :])
        if rest:
            self._pending[request_id] = rest
        else:
            self._pending.pop(request_id, None)
        return granted

    def take_granted(self) -> list[tuple[str, list[Need]]]:
        """Requests at the head of the queue that fit by now, in order, with what each was granted.

        To be called whenever something was given back.
        """
        out: list[tuple[str, list[Need]]] = []
        while self._pending:
            request_id, needs = next(iter(self._pending.items()))
            granted = self._grant(request_id, needs)
            if not granted:
                break
            out.append((request_id, granted))
            if len(granted) < len(needs):
                self._pending[request_id] = needs[len(granted) :]
                break
            del self._pending[request_id]
        return out

    def finalize_allocation(self, mm_hash: str) -> None:
        """vLLM scheduled the item: what was preallocated is an allocation now."""
        hold = self._holds.get(mm_hash)
        if hold is not None:
            hold.allocated = True

    def depreallocate(self, request_id: str) -> None:
        """The request is gone, or starts again: whatever it holds or waits for is free."""
        self._pending.pop(request_id, None)
        for mm_hash in [h for h, hold in self._holds.items() if request_id in hold.request_ids]:
            self.deallocate(request_id, mm_hash)

    def deallocate(self, request_id: str, mm_hash: str) -> None:
        """The request is done with this item; its space is free when no other request holds it."""
        hold = self._holds.get(mm_hash)
        if hold is None:
            return
        hold.request_ids.discard(request_id)
        if not hold.request_ids:
            self._used -= hold.num_embeds
            del self._holds[mm_hash]

    def _grant(self, request_id: str, needs: Sequence[Need]) -> list[Need]:
        granted = self._fitting(needs)
        if len(granted) < len(needs) and not self._may_go_by_items(request_id, needs):
            return []
        for need in granted:
            hold = self._holds.get(need.mm_hash)
            if hold is None:
                hold = self._holds[need.mm_hash] = _Hold(need.num_embeds, set())
                self._used += need.num_embeds
            hold.request_ids.add(request_id)
        return granted

    def _fitting(self, needs: Sequence[Need]) -> list[Need]:
        """The longest prefix of `needs` that there is space for now."""
        if self._budget is None:
            return list(needs)
        free, new = self._budget - self._used, set[str]()
        for end, need in enumerate(needs):
            if need.mm_hash in self._holds or need.mm_hash in new:
                continue
            if need.num_embeds > free:
                return list(needs[:end])
            free -= need.num_embeds
            new.add(need.mm_hash)
        return list(needs)

    def _may_go_by_items(self, request_id: str, needs: Sequence[Need]) -> bool:
        """Larger than the budget, and nobody else holds space."""
        size = sum({need.mm_hash: need.num_embeds for need in needs}.values())
        return (
            self._budget is not None
            and size > self._budget
            and all(hold.request_ids == {request_id} for hold in self._holds.values())
        )


class AsyncPreallocator(SyncPreallocator):
    """Without a budget: every request is granted at once; the store's own limits are the only ones."""

    def __init__(self) -> None:
        super().__init__(None)


def make_preallocator(strategy: str, budget_embeds: int) -> SyncPreallocator:
    """`strategy` is `sync` or `async`.

    Raises:
        ValueError: another strategy.
    """
    if strategy == "sync":
        return SyncPreallocator(budget_embeds)
    if strategy == "async":
        return AsyncPreallocator()
    raise ValueError(f"unknown preallocation strategy {strategy!r}: expected 'sync' or 'async'")
