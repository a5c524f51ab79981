"""LiveView: one caller's view of the page.

A caller sees the requests of its own API key. An operator's key sees those of all keys, and so does everybody
where no keys are set.
"""

import time
from collections.abc import Iterable
from typing import Any

import orjson

from triptych_gateway.access.callers import Caller
from triptych_gateway.tracing.recent_requests import RecentRequest, RecentRequests
from triptych_gateway.ui.system_view import SystemView


class LiveView:
    """Page content for one caller, by its rights."""

    def __init__(self, caller: Caller, recents: RecentRequests, system: SystemView) -> None:
        self._caller = caller
        self._recents = recents
        self._system = system

    @property
    def owner(self) -> str | None:
        """Owner whose requests are shown; None for all."""
        return None if self._caller.is_operator else self._caller.owner

    async def system(self) -> dict[str, Any]:
        known = await self._system.describe(self._caller)
        if self._caller.is_operator:
            totals = {
                "num_requests": self._recents.num_requests,
                "num_items": self._recents.num_items,
                "avoided": dict(self._recents.avoided),
            }
            known["since_start"] = totals
        return known

    async def snapshot(self) -> dict[str, Any]:
        """Return the whole view; requests with the oldest first."""
        known = await self.system()
        return {"system": known, "requests": self.as_json(self._recents.visible_to(self.owner))}

    def running(self) -> list[RecentRequest]:
        """Return running requests among those that are shown."""
        return [each for each in self._recents.visible_to(self.owner) if each.status is None]

    def as_json(self, requests: Iterable[RecentRequest]) -> list[orjson.Fragment]:
        """Return fragments for `orjson.dumps`."""
        now = time.monotonic()
        return [each.as_fragment(now) for each in requests]
