"""Preallocator: which requests may have space in the encoder cache, before their tensors exist. Pure.

The two-step bookkeeping has the field's names: space is `preallocate`d for a request as a whole, becomes
an allocation when vLLM schedules the item (`finalize_allocation`), and ends with `deallocate`, or with
`depreallocate` when the item was never scheduled. Whole requests only: two requests that each held half
of what the other needs would wait for ever. First come, first served: a large request is not overtaken.
A request that is larger than the whole budget is served item by item: it gets the longest prefix of its
items that fits, and the rest as it frees them.

`sync` keeps a budget in rows; `async` is the same interface without a budget.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Need:
    """One item of one request."""

    mm_hash: str
    num_embeds: int  # rows


class Preallocator(Protocol):
    """See the module docstring. `request_id` is vLLM's engine request id."""

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
        return self._budget is None or self._cost(needs) <= self._budget - self._used

    def preallocate(self, request_id: str, needs: Sequence[Need]) -> list[Need]:
        """Grant what may be granted now; the request queues up for the rest.

        Returns the granted needs: all of them, or, for a request larger than the budget, a prefix;
        or none, and `take_granted` names the request later.
        """
        if self._pending:  # nobody overtakes
            self._pending[request_id] = tuple(needs)
            return []
        granted = self._grant(request_id, needs)
        if len(granted) < len(needs):
            self._pending[request_id] = tuple(needs[len(granted) :])
        return granted

    def take_granted(self) -> list[tuple[str, list[Need]]]:
        """Requests at the head of the queue that fit by now, in order, with what each was granted."""
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

    def _cost(self, needs: Sequence[Need]) -> int:
        new = {need.mm_hash: need.num_embeds for need in needs if need.mm_hash not in self._holds}
        return sum(new.values())

    def _grant(self, request_id: str, needs: Sequence[Need]) -> list[Need]:
        if self.can_preallocate(needs):
            granted = list(needs)
        elif self._budget is not None and self._request_size(needs) > self._budget:
            granted = self._longest_prefix(needs)
        else:
            return []
        for need in granted:
            hold = self._holds.get(need.mm_hash)
            if hold is None:
                hold = self._holds[need.mm_hash] = _Hold(need.num_embeds, set())
                self._used += need.num_embeds
            hold.request_ids.add(request_id)
        return granted

    def _request_size(self, needs: Sequence[Need]) -> int:
        return sum({need.mm_hash: need.num_embeds for need in needs}.values())

    def _longest_prefix(self, needs: Sequence[Need]) -> list[Need]:
        for end in range(len(needs) - 1, 0, -1):
            if self.can_preallocate(needs[:end]):
                return list(needs[:end])
        return []


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
