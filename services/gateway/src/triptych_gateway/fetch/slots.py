"""How many downloads run at once: in all, and from one host. The others wait, first come, first served."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _HostSlots:
    slots: asyncio.Semaphore
    num_users: int = 0  # that hold a slot, or wait for one


class FetchSlots:
    """A host's slot is taken first: those that wait for a slow host keep none of the others'."""

    def __init__(self, max_total: int, max_per_host: int) -> None:
        self._total = asyncio.Semaphore(max_total)
        self._max_per_host = max_per_host
        self._hosts: dict[str, _HostSlots] = {}

    def __len__(self) -> int:
        """Hosts that a download runs from, or waits for."""
        return len(self._hosts)

    @asynccontextmanager
    async def hold(self, host: str) -> AsyncIterator[None]:
        """Hold a slot while a block runs. Waits for it without a bound."""
        own = self._hosts.setdefault(host, _HostSlots(asyncio.Semaphore(self._max_per_host)))
        own.num_users += 1
        try:
            async with own.slots, self._total:
                yield
        finally:
            own.num_users -= 1
            if not own.num_users:
                del self._hosts[host]
