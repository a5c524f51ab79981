"""Which encoders take jobs of this namespace, from the registry: they share them."""

import time

from triptych_common.bus.fair_share import Consumers, Peer
from triptych_common.coordination import Registry
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import Role
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

REFRESH_INTERVAL_S = 1.0


class EncoderPeers:
    """Not older than `REFRESH_INTERVAL_S`, while Redis is there."""

    def __init__(self, namespace_digest: str, registry: Registry) -> None:
        self._namespace_digest = namespace_digest
        self._registry = registry
        self._consumers = Consumers()
        self._refreshed_at = float("-inf")

    async def find(self) -> Consumers:
        """Those that live and do not drain, this one among them, and how fast each says that it is."""
        if time.monotonic() - self._refreshed_at > REFRESH_INTERVAL_S:
            self._refreshed_at = time.monotonic()
            try:
                records = await self._registry.list_instances()
            except BusUnavailableError as error:
                log.warning("encoders not refreshed from the registry", error=str(error))
                return self._consumers
            self._consumers = Consumers(
                {
                    each.instance: Peer(each.row_s, each.num_slots)
                    for each in records
                    if each.role is Role.ENCODE
                    and each.namespace_digest == self._namespace_digest
                    and not each.draining
                }
            )
        return self._consumers
