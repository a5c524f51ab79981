"""StoreReader: use of the cache_store, if its socket is on the gateway's host. The session is opened for the
first open page and closed after the last one.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.store import StatsQuery, StoreStats
from triptych_common.store_session import AsyncStoreSession

TIMEOUT_S = 0.5


class StoreReader:
    """Reader of the store's use, for one event loop."""

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
