"""ItemQueue: the items that a step shall be taken for, each listed once; what no encoder knows goes first."""

import asyncio
from collections import OrderedDict

from triptych_common.protocol.ids import MmHash


class ItemQueue:
    """Two queues. While Redis is away each step takes its whole timeout: no new order may wait for checks."""

    def __init__(self) -> None:
        self._urgent: OrderedDict[MmHash, None] = OrderedDict()
        self._others: OrderedDict[MmHash, None] = OrderedDict()
        self._is_some = asyncio.Event()

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def add(self, mm_hash: MmHash, *, is_urgent: bool) -> None:
        """List it, at the end; one that becomes urgent moves up, none moves down."""
        if is_urgent:
            self._others.pop(mm_hash, None)
            self._urgent.setdefault(mm_hash)
        elif mm_hash not in self._urgent:
            self._others.setdefault(mm_hash)
        self._is_some.set()

    async def get(self) -> MmHash:
        """Take the first one, when there is one. Several may wait."""
        while not len(self):
            self._is_some.clear()
            await self._is_some.wait()
        mm_hash, _ = (self._urgent or self._others).popitem(last=False)
        return mm_hash
