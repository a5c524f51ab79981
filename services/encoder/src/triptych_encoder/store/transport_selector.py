"""Selects the memory for tensors, so that the prefill_decodes of the namespace can read them."""

import time
from collections.abc import Callable
from dataclasses import replace

from triptych_common.coordination import Registry
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.domain.transports import (
    StoreSlab,
    TransportCapabilities,
    choose_memories,
    consumers_of,
    transport_of,
)
from triptych_common.protocol.messages import Transport
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

REFRESH_INTERVAL_S = 1.0


class TransportSelector:
    """Consumers of this namespace, as registered `REFRESH_INTERVAL_S` ago at most."""

    def __init__(
        self,
        own: Callable[[], TransportCapabilities],
        namespace_digest: str,
        registry: Registry,
        slab: Callable[[], StoreSlab | None],
        store: str | None = None,
    ) -> None:
        """`own` returns this encoder's offer, which changes with the store's slab; `store` is the store's
        name."""
        self._own = own
        self._namespace_digest = namespace_digest
        self._registry = registry
        self._slab = slab
        self._store = store
        self._consumers: list[TransportCapabilities] = []
        self._refreshed_at = float("-inf")
        self._logged: list[str] = []

    async def memories(self) -> list[str]:
        """Memories best first; the next is used when the store has no room in the one before."""
        own = replace(self._own(), store=self._store)
        has_choice = len(own.transports) > 1 or Transport.CUDA_IPC in own.transports
        if has_choice and time.monotonic() - self._refreshed_at > REFRESH_INTERVAL_S:
            await self._refresh()
        memories = choose_memories(own, self._consumers, self._slab())
        if memories != self._logged:
            self._logged = memories
            log.info("transport chosen", transports=[transport_of(each).value for each in memories])
        return memories

    async def _refresh(self) -> None:
        try:
            records = await self._registry.list_instances()
        except BusUnavailableError as error:
            log.warning("consumers not refreshed from the registry", error=str(error))
            return
        self._refreshed_at = time.monotonic()
        consumers = consumers_of(self._namespace_digest, records)
        self._consumers = [TransportCapabilities.announced(record) for record in consumers]
