"""Limit on the total cost of what runs, or is kept, at once.

First come, first served; what costs nothing does not wait.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class CostBudget:
    def __init__(self, capacity: int) -> None:
        """`capacity`: a cost above it is taken alone."""
        self._capacity = capacity
        self._free = capacity
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, cost: int) -> AsyncIterator[None]:
        """Hold `cost` during the block, after waiting for room."""
        held = await self.acquire(cost)
        try:
            yield
        finally:
            self.release(held)

    async def acquire(self, cost: int) -> int:
        """Wait for room; returns the amount to `release` later."""
        cost = min(cost, self._capacity)
        if not cost or (not self._waiting and cost <= self._free):
            self._free -= cost
            return cost
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((cost, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(cost)
            else:
                with contextlib.suppress(ValueError):  # `_admit` has passed it over already
                    self._waiting.remove((cost, turn))
                self._admit()
            raise
        return cost

    def release(self, held: int) -> None:
        """Give back what `acquire` returned."""
        self._free += held
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            cost, turn = self._waiting[0]
            if turn.cancelled():  # its job was cancelled, and has not run yet
                self._waiting.popleft()
                continue
            if cost > self._free:
                return
            self._waiting.popleft()
            self._free -= cost
            turn.set_result(None)
