"""Ledger: requesters that still wait for a sealed entry, which decide how long the encoder keeps its pin.
Pure.

    ANNOUNCED --sealed--> HELD --every requester acked, or the deadline passed--> RELEASED
        `--every requester acked, its job failed, or the deadline passed-------------^

The producer's pin bridges the time between the seal and the consumers' own pins.
"""

from dataclasses import dataclass, field
from enum import Enum

from triptych_common.domain.transitions import check_transition
from triptych_common.protocol.messages import RequesterKey


class PinState(Enum):
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
    """One item; `pin_ids` (one for each piece) are set from HELD on. Only `enter` assigns `state`."""

    mm_hash: str
    waiting: set[RequesterKey]
    deadline: float  # monotonic seconds
    pin_ids: list[int] = field(default_factory=list)
    granted: set[RequesterKey] = field(default_factory=set)
    state: PinState = PinState.ANNOUNCED

    def enter(self, state: PinState) -> None:
        """Move to `state`; raises IllegalTransitionError if it cannot follow."""
        check_transition(ALLOWED, f"pin of {self.mm_hash}", self.state, state)
        self.state = state


class Ledger:
    """Items by mm_hash. Methods that end pins return them for the caller to give back to the store."""

    def __init__(self) -> None:
        self._items: dict[str, PinnedItem] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add_requesters(self, mm_hash: str, requesters: set[RequesterKey], deadline: float) -> None:
        """Add requesters to whom a job's item was announced."""
        item = self._items.get(mm_hash)
        if item is None:
            self._items[mm_hash] = PinnedItem(mm_hash, set(requesters), deadline)
        else:
            item.waiting |= requesters
            item.deadline = max(item.deadline, deadline)

    def hold_pins(self, mm_hash: str, pin_ids: list[int]) -> list[int]:
        """Hold the pins of a sealed item; returns pins that are not needed, as of a second seal."""
        item = self._items.get(mm_hash)
        if item is None or item.state is PinState.HELD:
            return pin_ids
        item.pin_ids = pin_ids
        item.enter(PinState.HELD)
        return self._release_if_done(item)

    def add_grant(self, mm_hash: str, key: RequesterKey) -> None:
        """Record that the requester's prefill_decode keeps space for the item."""
        item = self._items.get(mm_hash)
        if item is not None:
            item.granted.add(key)

    def is_granted(self, mm_hash: str) -> bool:
        """True if any consumer keeps space for the item."""
        item = self._items.get(mm_hash)
        return item is not None and bool(item.granted)

    def remove_requesters(self, mm_hash: str, requesters: set[RequesterKey]) -> list[int]:
        """Remove requesters that send no more acks: acked, declined, left, or failed. Idempotent.

        Others may still wait, also for an earlier job that did not fail.
        """
        item = self._items.get(mm_hash)
        if item is None:
            return []
        item.waiting -= requesters
        item.granted -= requesters
        return self._release_if_done(item)

    def expire(self, now: float) -> list[int]:
        """End the pins of items whose requesters never answered."""
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
