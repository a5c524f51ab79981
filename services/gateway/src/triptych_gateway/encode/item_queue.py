"""ItemQueue: the items that a step is due for, each listed once and stepped by one task at a time."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from triptych_common.protocol.ids import MmHash


class ItemQueue:
    """Two queues. While Redis is away each step takes its whole timeout: no new order may wait for checks."""

    def __init__(self) -> None:
        self._urgent: OrderedDict[MmHash, None] = OrderedDict()
        self._others: OrderedDict[MmHash, None] = OrderedDict()
        self._unchecked: set[MmHash] = set()  # what Redis knows of them may have changed
        self._busy: set[MmHash] = set()  # a step is under way
        self._again: set[MmHash] = set()  # added while a step was under way
        self._round: set[MmHash] = set()  # that the last round of checks has not reached yet
        self._is_some = asyncio.Event()

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def add_item(self, mm_hash: MmHash, *, is_urgent: bool, check: bool = False) -> None:
        """List it, at the end; an item that becomes urgent moves up, none moves down."""
        if check:
            self._unchecked.add(mm_hash)
        if is_urgent:
            self._others.pop(mm_hash, None)
            self._urgent.setdefault(mm_hash)
        elif mm_hash not in self._urgent:
            self._others.setdefault(mm_hash)
        self._is_some.set()

    def begin_round(self, mm_hashes: Iterable[MmHash]) -> None:
        """These are about to be added for a check."""
        self._round = set(mm_hashes)

    @property
    def has_round(self) -> bool:
        """Some of the last round still wait for their check: Redis is slow, or away."""
        return bool(self._round)

    async def take_item(self) -> tuple[MmHash, bool]:
        """The first item that no other task steps, and whether to check it. `finish_item` must follow."""
        while True:
            while not len(self):
                self._is_some.clear()
                await self._is_some.wait()
            mm_hash, _ = (self._urgent or self._others).popitem(last=False)
            if mm_hash in self._busy:
                self._again.add(mm_hash)
                continue
            self._busy.add(mm_hash)
            is_check = mm_hash in self._unchecked
            self._unchecked.discard(mm_hash)
            return mm_hash, is_check

    def finish_item(self, mm_hash: MmHash) -> None:
        """Its step has ended; if it was added meanwhile it is the next one."""
        self._busy.discard(mm_hash)
        if mm_hash in self._again:
            self._again.discard(mm_hash)
            self.add_item(mm_hash, is_urgent=True)
            self._urgent.move_to_end(mm_hash, last=False)
        else:
            self._round.discard(mm_hash)
