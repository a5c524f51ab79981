"""Preallocator: decides which requests get space in the encoder cache, before their tensors exist. Pure.

    None --preallocate--> HELD --finalize_allocation--> ALLOCATED --> FREE
                            `------------------------------------------^
    (to FREE by `deallocate`, or by `depreallocate` with its last request)

The two-step bookkeeping of each item's space has the field's names: it is `preallocate`d for a request as a
whole, becomes an allocation when vLLM schedules the item (`finalize_allocation`), and ends with `deallocate`
when its last request is done with it, or with `depreallocate` when that request is gone. Whole requests only:
two requests that each held half of what the other needs would wait for ever. First come, first served: a
large request is not overtaken.

A request that is larger than the whole budget is served item by item, and alone: when no other request holds
space it gets the longest prefix of its items that fits, and the rest as it frees them. Alone, because it
runs with a part of its items: it holds KV blocks while it waits for space, and another request that held that
space could be waiting for its KV blocks.

`sync` keeps a budget in rows; `async` is the same interface without a budget.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from triptych_common.domain.transitions import check_transition


@dataclass(frozen=True)
class Need:
    """One place of one request, with its item."""

    mm_hash: str
    num_embeds: int  # rows
    item_index: int = 0  # position among the request's media items


class SpaceState(Enum):
    HELD = auto()
    ALLOCATED = auto()
    FREE = auto()


ALLOWED: dict[SpaceState, frozenset[SpaceState]] = {
    SpaceState.HELD: frozenset({SpaceState.ALLOCATED, SpaceState.FREE}),
    SpaceState.ALLOCATED: frozenset({SpaceState.FREE}),
    SpaceState.FREE: frozenset(),
}


@dataclass
class ItemSpace:
    """Space for one item, shared by the requests that need it."""

    mm_hash: str
    num_embeds: int
    engine_request_ids: set[str] = field(default_factory=set)
    state: SpaceState = SpaceState.HELD


def move_space(space: ItemSpace, to: SpaceState) -> None:
    """Move `space` to `to`; nothing else assigns `space.state`.

    Raises:
        IllegalTransitionError: `to` cannot follow its state.
    """
    check_transition(ALLOWED, space.mm_hash, space.state, to)
    space.state = to


class Preallocator:
    """Budget of `budget_embeds` rows (None: unlimited); `engine_request_id` is vLLM's `request_id`."""

    def __init__(self, budget_embeds: int | None) -> None:
        self._budget = budget_embeds
        self._spaces: dict[str, ItemSpace] = {}
        self._used = 0
        self._pending: OrderedDict[str, tuple[Need, ...]] = OrderedDict()
        self.num_granted = 0  # items, ever
        self.num_queued = 0  # items for which there was no space when it was asked for

    @property
    def budget_embeds(self) -> int | None:
        return self._budget

    @property
    def num_embeds_used(self) -> int:
        return self._used

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def can_ever_hold(self, need: Need) -> bool:
        return self._budget is None or need.num_embeds <= self._budget

    def preallocate(self, engine_request_id: str, needs: Sequence[Need]) -> list[Need]:
        """Grant what fits now, and queue the request for the rest.

        A pending request keeps its place in the queue, and `needs` replace its earlier ones. Returns the
        granted needs: all, a prefix (for a request larger than the budget), or none; `take_granted` names the
        request later.
        """
        is_first = not self._pending or next(iter(self._pending)) == engine_request_id  # no request overtakes
        granted = self._grant(engine_request_id, needs) if is_first else []
        rest = tuple(needs[len(granted) :])
        self.num_queued += len(rest)
        if rest:
            self._pending[engine_request_id] = rest
        else:
            self._pending.pop(engine_request_id, None)
        return granted

    def cancel_pending(self, engine_request_id: str) -> None:
        """Remove the request from the queue; it keeps what it holds."""
        self._pending.pop(engine_request_id, None)

    def take_granted(self) -> list[tuple[str, list[Need]]]:
        """Requests at the head of the queue that fit now, in order, with their granted needs.

        The caller calls it whenever something was given back.
        """
        out: list[tuple[str, list[Need]]] = []
        while self._pending:
            engine_request_id, needs = next(iter(self._pending.items()))
            granted = self._grant(engine_request_id, needs)
            if not granted:
                break
            out.append((engine_request_id, granted))
            if len(granted) < len(needs):
                self._pending[engine_request_id] = needs[len(granted) :]
                break
            del self._pending[engine_request_id]
        return out

    def finalize_allocation(self, mm_hash: str) -> None:
        """Turn the preallocation of an item that vLLM scheduled into an allocation."""
        space = self._spaces.get(mm_hash)
        if (
            space is not None and space.state is SpaceState.HELD
        ):  # else scheduled again: the cache was emptied
            move_space(space, SpaceState.ALLOCATED)

    def depreallocate(self, engine_request_id: str) -> None:
        """Free everything that the request holds or waits for, because it is gone or starts again."""
        self._pending.pop(engine_request_id, None)
        for space in list(self._spaces.values()):
            self.deallocate(engine_request_id, space.mm_hash)

    def deallocate(self, engine_request_id: str, mm_hash: str) -> None:
        """Free the item for this request; its space is free once no other request holds it."""
        space = self._spaces.get(mm_hash)
        if space is None:
            return
        space.engine_request_ids.discard(engine_request_id)
        if not space.engine_request_ids:
            move_space(space, SpaceState.FREE)
            self._used -= space.num_embeds
            del self._spaces[mm_hash]

    def _grant(self, engine_request_id: str, needs: Sequence[Need]) -> list[Need]:
        granted = self._fitting(needs)
        if len(granted) < len(needs) and not self._may_go_by_items(engine_request_id, needs):
            return []
        for need in granted:
            space = self._spaces.get(need.mm_hash)
            if space is None:
                space = self._spaces[need.mm_hash] = ItemSpace(need.mm_hash, need.num_embeds)
                self._used += need.num_embeds
            space.engine_request_ids.add(engine_request_id)
        self.num_granted += len(granted)
        return granted

    def _fitting(self, needs: Sequence[Need]) -> list[Need]:
        """Longest prefix of `needs` that has space now."""
        if self._budget is None:
            return list(needs)
        free, new = self._budget - self._used, set[str]()
        for end, need in enumerate(needs):
            if need.mm_hash in self._spaces or need.mm_hash in new:
                continue
            if need.num_embeds > free:
                return list(needs[:end])
            free -= need.num_embeds
            new.add(need.mm_hash)
        return list(needs)

    def _may_go_by_items(self, engine_request_id: str, needs: Sequence[Need]) -> bool:
        """True if the request exceeds the budget and no other request holds space."""
        size = sum({need.mm_hash: need.num_embeds for need in needs}.values())
        return (
            self._budget is not None
            and size > self._budget
            and all(space.engine_request_ids == {engine_request_id} for space in self._spaces.values())
        )


class SyncPreallocator(Preallocator):
    """Preallocator with a budget: a request waits until there is space for it."""


class AsyncPreallocator(Preallocator):
    """Preallocator without a budget: every request is granted at once, and only the store limits."""

    def __init__(self) -> None:
        super().__init__(None)


def make_preallocator(strategy: str, budget_embeds: int) -> Preallocator:
    """Preallocator of `strategy`, which is `sync` or `async`. Raises ValueError: another strategy."""
    if strategy == "sync":
        return SyncPreallocator(budget_embeds)
    if strategy == "async":
        return AsyncPreallocator()
    raise ValueError(f"unknown preallocation strategy {strategy!r}: expected 'sync' or 'async'")
