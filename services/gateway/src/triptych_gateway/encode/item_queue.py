"""ItemQueue: the items that a step is due for, each listed once and stepped by one task at a time."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from triptych_common.protocol.ids import MmHash


@dataclass(eq=False, slots=True)
class _Lane:
    """The new orders of one request, in the order of its prompt."""

    priority: int  # lower is earlier
    items: OrderedDict[MmHash, None] = field(default_factory=OrderedDict)
    is_busy: bool = False  # a step of one of them is under way


class ItemQueue:
    """Two queues. While Redis is away each step takes its whole timeout: no new order may wait for checks.

    New orders of one request are stepped one after the other, so that its jobs are published in order.
    Requests of one priority take turns: one with many items does not hold back the others. Those of a higher
    one go first; a step takes a round trip to Redis, so the others wait for moments.
    """

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()  # urgent; whose turn is next comes first
        self._lane_of: dict[MmHash, str] = {}  # of urgent items, until their step has ended
        self._others: OrderedDict[MmHash, None] = OrderedDict()
        self._unchecked: set[MmHash] = set()  # what Redis knows of them may have changed
        self._busy: set[MmHash] = set()  # a step is under way
        self._again: dict[MmHash, tuple[str | None, int]] = {}  # added while a step was under way: last lane
        self._round: set[MmHash] = set()  # that the last round of checks has not reached yet
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return sum(len(lane.items) for lane in self._lanes.values()) + len(self._others)

    def add_item(
        self,
        mm_hash: MmHash,
        *,
        is_urgent: bool,
        check: bool = False,
        lane: str | None = None,
        priority: int = 0,
    ) -> None:
        """List it, at the end; an item that becomes urgent moves up, none moves down.

        `lane`: the request whose other orders it must not overtake, with its `priority`; None: its order
        belongs to none.
        """
        if check:
            self._unchecked.add(mm_hash)
        if mm_hash in self._busy:
            self._again[mm_hash] = (lane, priority) if lane else self._again.get(mm_hash, (None, priority))
            return
        if mm_hash in self._lane_of:
            return
        if is_urgent:
            self._others.pop(mm_hash, None)
            name = lane or mm_hash
            self._lane_of[mm_hash] = name
            self._lanes.setdefault(name, _Lane(priority)).items[mm_hash] = None
        else:
            self._others.setdefault(mm_hash)
        self._changed.set()

    def begin_round(self, mm_hashes: Iterable[MmHash]) -> None:
        """These are about to be added for a check."""
        self._round = set(mm_hashes)

    @property
    def has_round(self) -> bool:
        """Some of the last round still wait for their check: Redis is slow, or away."""
        return bool(self._round)

    async def take_item(self) -> tuple[MmHash, bool]:
        """The first item whose turn it is, and whether to check it. `finish_item` must follow."""
        while (mm_hash := self._next()) is None:
            self._changed.clear()
            await self._changed.wait()
        self._busy.add(mm_hash)
        is_check = mm_hash in self._unchecked
        self._unchecked.discard(mm_hash)
        return mm_hash, is_check

    def _next(self) -> MmHash | None:
        ready = [(name, lane) for name, lane in self._lanes.items() if lane.items and not lane.is_busy]
        if ready:
            name, lane = min(ready, key=lambda each: each[1].priority)  # of equal ones whose turn it is
            lane.is_busy = True
            self._lanes.move_to_end(name)
            return lane.items.popitem(last=False)[0]
        return self._others.popitem(last=False)[0] if self._others else None

    def finish_item(self, mm_hash: MmHash) -> None:
        """Its step has ended; if it was added meanwhile it is the next one."""
        self._busy.discard(mm_hash)
        name, own_priority = self._lane_of.pop(mm_hash, None), 0
        if name is not None:
            lane = self._lanes[name]
            lane.is_busy, own_priority = False, lane.priority
            if not lane.items:
                del self._lanes[name]
        if mm_hash in self._again:
            lane_again, priority = self._again.pop(mm_hash)
            if lane_again is None:
                lane_again, priority = name, own_priority
            self.add_item(mm_hash, is_urgent=True, lane=lane_again, priority=priority)
            if name is not None or lane_again is None:  # else it must not overtake its request's other orders
                self._make_next(mm_hash)
        else:
            self._round.discard(mm_hash)
        self._changed.set()

    def _make_next(self, mm_hash: MmHash) -> None:
        name = self._lane_of[mm_hash]
        self._lanes[name].items.move_to_end(mm_hash, last=False)
        self._lanes.move_to_end(name, last=False)
