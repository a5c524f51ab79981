"""Load in the agent's registry record, for operators: the store's contents and the state of the links.

`triptych status` shows it, and a drain of another host reads the free space. It is as old as the last
heartbeat and decides about no request.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych_common.domain.errors import StoreError
from triptych_common.protocol.messages import MAX_FABRIC_LINKS, FabricLink, FabricLoad
from triptych_common.protocol.store import StoreStats
from triptych_common.protocol.transfers import TransferCompleted, TransferFailed
from triptych_fabric.local_store import LocalStore
from triptych_fabric.sender.links import OutgoingLinks

INTERVAL_S = 1.0  # as the heartbeats


@dataclass
class _Tally:
    """Counts of the transfers to one target."""

    num_bytes: int = 0
    bytes_per_s: float | None = None
    failure: str | None = None
    failed_at: float = 0.0  # monotonic second
    used_at: float = 0.0  # monotonic second


class AgentLoad:
    """Collects the load; used in one event loop."""

    def __init__(self, store: LocalStore, links: OutgoingLinks) -> None:
        self._store = store
        self._links = links
        self._stats: StoreStats | None = None
        self._tallies: dict[str, _Tally] = {}

    async def run(self) -> None:
        """Query the store's statistics periodically, without end."""
        while True:
            try:
                self._stats = await self._store.stats()
            except StoreError:  # it is being restarted; what was known stays
                pass
            await asyncio.sleep(INTERVAL_S)

    def on_result(self, result: TransferCompleted | TransferFailed) -> None:
        tally = self._tallies.setdefault(result.target, _Tally())
        tally.used_at = time.monotonic()
        if isinstance(result, TransferFailed):
            tally.failure, tally.failed_at = result.kind.value, tally.used_at
        elif result.num_bytes:
            tally.num_bytes += result.num_bytes
            if result.transfer_s > 0:
                tally.bytes_per_s = result.num_bytes / result.transfer_s
        if len(self._tallies) > MAX_FABRIC_LINKS:
            del self._tallies[min(self._tallies, key=lambda each: self._tallies[each].used_at)]

    def fields(self) -> Mapping[str, Any]:
        stats = self._stats
        if stats is None:
            return {}
        load = FabricLoad(
            num_entries=stats.num_entries,
            entries_num_bytes=stats.ready_num_bytes + stats.pinned_num_bytes,
            free_num_bytes=stats.free_num_bytes,
            links=self._link_reports(time.monotonic()),
        )
        return {"fabric_load": load}

    def _link_reports(self, now: float) -> tuple[FabricLink, ...]:
        offers = self._links.offers_by_receiver()
        targets = [*self._tallies, *(each for each in sorted(offers) if each not in self._tallies)]
        reports = []
        for target in targets[:MAX_FABRIC_LINKS]:
            tally = self._tallies.get(target, _Tally())
            report = FabricLink(
                target=target,
                transport=self._links.transport_to(target),
                is_up=target in offers,
                num_in_flight=offers.get(target, 0),
                num_bytes=tally.num_bytes,
                bytes_per_s=tally.bytes_per_s,
                failure=tally.failure,
                failed_s=None if tally.failure is None else now - tally.failed_at,
            )
            reports.append(report)
        return tuple(reports)
