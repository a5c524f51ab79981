"""SystemView: instances, streams and the host's store for the page at `/ui`."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_common.protocol.store import StatsQuery, StoreStats
from triptych_common.store_session import AsyncStoreSession
from triptych_gateway.access.auth import Caller
from triptych_gateway.gateway import Gateway
from triptych_gateway.routing.router import ENCODING_ROLES

TIMEOUT_S = 0.5


class StoreReader:
    def __init__(self, socket_path: Path, client_name: str) -> None:
        self._socket_path = socket_path
        self._client_name = client_name
        self._session: AsyncStoreSession | None = None
        self._lock = asyncio.Lock()
        self._num_holders = 0

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Keep the session open while the block runs."""
        self._num_holders += 1
        try:
            yield
        finally:
            self._num_holders -= 1
            async with self._lock:
                if not self._num_holders:
                    await self._close()

    async def read(self) -> StoreStats | None:
        """Return the store's use within `hold`; None without a store here, or an answer."""
        async with self._lock:
            try:
                if self._session is None or not self._session.is_connected:
                    await self._close()
                    if not self._socket_path.is_socket():
                        return None
                    self._session = await AsyncStoreSession.connect(
                        self._socket_path, self._client_name, timeout_s=TIMEOUT_S
                    )
                stats = await self._session.request(StatsQuery(seq=0), TIMEOUT_S)
            except (TriptychError, OSError):
                await self._close()
                return None
        return stats if isinstance(stats, StoreStats) else None

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


READ_INTERVAL_S = 1.0
DIGEST_CHARS = 12  # of a namespace's, which are shown


class SystemView:
    def __init__(self, gateway: Gateway) -> None:
        settings = gateway.settings
        self._gateway, self._view = gateway, gateway.view
        self._limiter = gateway.services.access.limiter
        self.store = StoreReader(settings.store_socket, f"{settings.instance}/ui")
        self._reading = asyncio.Lock()
        self._read_at = float("-inf")  # monotonic seconds
        self._in_hand: dict[str, int] = {}
        self._stats: StoreStats | None = None

    async def describe(self, caller: Caller) -> dict[str, Any]:
        """Return what `caller` may see: instances and models; an operator also sees each one's load."""
        own = self._gateway.registration.record
        known = {
            "gateway": own.instance,
            "now_s": round(time.time(), 3),
            "is_operator": caller.is_operator,
            "key_name": caller.key_name,
            "redis": self._view.is_fresh,
            "ready": bool(self._view.serving) and not own.draining,
            "models": [model for model in self._view.models if caller.may_use(model)],
            "load": None,
        }
        if caller.is_operator:
            await self._read()
            known["load"] = self._load()
        known["instances"] = [
            {
                "instance": record.instance,
                "role": record.role.value,
                "stages": _stages_of(record),
                "model": record.model if record.model and caller.may_use(record.model) else None,
                "draining": record.draining,
                "num_slots": record.num_slots,
                "num_busy": self._num_busy(record) if caller.is_operator else None,
            }
            for record in self._view.records
        ]
        return known

    async def _read(self) -> None:
        async with self._reading:
            if time.monotonic() - self._read_at < READ_INTERVAL_S:
                return
            await self._gateway.stream_lags.measure()
            self._in_hand = await self._gateway.stream_lags.read_in_hand()
            self._stats = await self.store.read()
            self._read_at = time.monotonic()

    def _load(self) -> dict[str, Any]:
        lags, sizes = self._gateway.stream_lags, self._gateway.orders.sizes
        return {
            "num_requests": self._limiter.num_requests,
            "max_requests": self._gateway.settings.max_requests_in_flight,
            "media_bytes": self._limiter.media_bytes,
            "max_media_bytes": self._limiter.max_media_bytes,
            "num_sizes": len(sizes),
            "max_sizes": sizes.max_items,
            "queues": [
                {
                    "namespace": stream[0][:DIGEST_CHARS],
                    "store": stream[1],
                    "num_waiting": lag.num_waiting,
                    "num_in_hand": lag.num_pending,
                    "oldest_s": round(lags.oldest_job_s.get(stream, 0.0), 3),
                }
                for stream, lag in lags.jobs.items()
            ],
            "store": None if self._stats is None else _store(self._stats),
        }

    def _num_busy(self, record: InstanceRecord) -> int | None:
        """Return this gateway's requests or jobs at the instance; None if it does not know."""
        if record.role is Role.GATEWAY:
            return (
                self._limiter.num_requests
                if record.instance == self._gateway.registration.record.instance
                else None
            )
        if record.role is Role.ENCODE:
            return self._in_hand.get(record.instance, 0)
        return self._gateway.router.num_in_flight(record.instance)


def _stages_of(record: InstanceRecord) -> list[str]:
    """Return the stages of a request that the instance takes part in."""
    if record.role is Role.GATEWAY:
        return ["gateway"]
    encodes = ["encode"] if record.role in ENCODING_ROLES or "encode" in record.role.value else []
    return [*encodes, *([] if record.role is Role.ENCODE else ["prefill_decode"])]


def _store(stats: StoreStats) -> dict[str, int]:
    return {
        "num_bytes": stats.region_num_bytes,
        "free_bytes": stats.free_num_bytes,
        "pinned_bytes": stats.pinned_num_bytes,
        "writing_bytes": stats.writing_num_bytes,
        "ready_bytes": stats.ready_num_bytes,
        "slab_bytes": stats.slab_num_bytes,
        "slab_free_bytes": stats.slab_free_num_bytes,
        "num_entries": stats.num_entries,
        "num_pins": stats.num_pins,
        "num_hits": stats.num_hits_total,
        "num_misses": stats.num_misses_total,
        "num_evictions": stats.num_evictions_total,
    }
