"""Ledger: which requesters still wait for a sealed entry, so how long the encoder keeps its pin of it. Pure.

    ANNOUNCED --sealed--> HELD --every requester acked, or the deadline passed--> RELEASED
        `--every requester acked, its job failed, or the deadline passed-------------^

The producer's pin bridges the time between the seal and the consumers' own pins.
"""

from dataclasses import dataclass, field
from enum import Enum

from triptych_common.domain.transitions import check_transition
from triptych_common.protocol.messages import RequesterKey


class PinState(Enum):
    """Of the producer's pin of one item."""

    ANNOUNCED = "announced"  # requesters know of the item; nothing is pinned yet
    HELD = "held"
    RELEASED = "released"  # the item is not in the ledger any more


ALLOWED: dict[PinState, frozenset[PinState]] = {
    PinState.ANNOUNCED: frozenset({PinState.HELD, PinState.RELEASED}),
    PinState.HELD: frozenset({PinState.RELEASED}),
    PinState.RELEASED: frozenset(),
}


@dataclass
class PinnedItem:
    """`pin_ids` are set from HELD on: one, or one of each piece. Only `enter` assigns `state`."""

    mm_hash: str
    waiting: set[RequesterKey]
    deadline: float  # monotonic seconds
    pin_ids: list[int] = field(default_factory=list)
    granted: set[RequesterKey] = field(default_factory=set)
    state: PinState = PinState.ANNOUNCED

    def enter(self, state: PinState) -> None:
        """Raises IllegalTransitionError when `state` cannot follow."""
        check_transition(ALLOWED, f"pin of {self.mm_hash}", self.state, state)
        self.state = state


class Ledger:
    """By mm_hash. Methods that end pins return them: the caller gives them back to the store."""

    def __init__(self) -> None:
        self._items: dict[str, PinnedItem] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add_requesters(self, mm_hash: str, requesters: set[RequesterKey], deadline: float) -> None:
        """A job's item was announced to these requesters."""
        item = self._items.get(mm_hash)
        if item is None:
            self._items[mm_hash] = PinnedItem(mm_hash, set(requesters), deadline)
        else:
            item.waiting |= requesters
            item.deadline = max(item.deadline, deadline)

    def hold_pins(self, mm_hash: str, pin_ids: list[int]) -> list[int]:
        """All of the item is sealed and pinned for us. A second pin of it is not needed."""
        item = self._items.get(mm_hash)
        if item is None or item.state is PinState.HELD:
            return pin_ids
        item.pin_ids = pin_ids
        item.enter(PinState.HELD)
        return self._release_if_done(item)

    def add_grant(self, mm_hash: str, key: RequesterKey) -> None:
        """This requester's prefill_decode keeps space for the item."""
        item = self._items.get(mm_hash)
        if item is not None:
            item.granted.add(key)

    def is_granted(self, mm_hash: str) -> bool:
        """Whether any consumer keeps space for it."""
        item = self._items.get(mm_hash)
        return item is not None and bool(item.granted)

    def remove_requesters(self, mm_hash: str, requesters: set[RequesterKey]) -> list[int]:
        """These send no more acks: they sent the final one, declined, left, or their job failed. Idempotent.

        Others may still wait, also for an earlier job that did not fail.
        """
        item = self._items.get(mm_hash)
        if item is None:
            return []
        item.waiting -= requesters
        item.granted -= requesters
        return self._release_if_done(item)

    def expire(self, now: float) -> list[int]:
        """Items whose requesters never answered."""
        late = [item for item in self._items.values() if item.deadline <= now]
        return [pin_id for item in late for pin_id in self._release(item)]

    def next_deadline(self) -> float | None:
        return min((item.deadline for item in self._items.values()), default=None)

    def _release_if_done(self, item: PinnedItem) -> list[int]:
        return [] if item.waiting else self._release(item)  # without a pin too: a later job lists it anew

    def _release(self, item: PinnedItem) -> list[int]:
        item.enter(PinState.RELEASED)
        del self._items[item.mm_hash]
        return item.pin_ids
