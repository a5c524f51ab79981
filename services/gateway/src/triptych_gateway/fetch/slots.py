"""Slots of downloads: in all, and per host. The others wait in order."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _HostSlots:
    slots: asyncio.Semaphore
    num_users: int = 0  # that hold a slot, or wait for one


class FetchSlots:
    """Slots taken per host first: requests that wait for a slow host take none of the others'."""

    def __init__(self, max_total: int, max_per_host: int) -> None:
        self._total = asyncio.Semaphore(max_total)
        self._max_per_host = max_per_host
        self._hosts: dict[str, _HostSlots] = {}

    def __len__(self) -> int:
        """Return the number of hosts with a running or waiting download."""
        return len(self._hosts)

    @asynccontextmanager
    async def hold(self, host: str) -> AsyncIterator[None]:
        """Hold a slot while the block runs. Waits for it without a bound."""
        own = self._hosts.setdefault(host, _HostSlots(asyncio.Semaphore(self._max_per_host)))
        own.num_users += 1
        try:
            async with own.slots, self._total:
                yield
        finally:
            own.num_users -= 1
            if not own.num_users:
                del self._hosts[host]
