"""Encoders that take jobs of this namespace, from the registry; those at the same store share its stream."""

import time
from collections.abc import Mapping

from triptych_common.bus.fair_share import Consumers, Peer
from triptych_common.coordination import Registry, store_of
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

REFRESH_INTERVAL_S = 1.0


class EncoderPeers:
    """Encoders as of `REFRESH_INTERVAL_S` ago at most, while Redis answers; draining ones are left out."""

    def __init__(self, namespace_digest: str, store: str, registry: Registry) -> None:
        """`store` is the store that this encoder writes to."""
        self.namespace_digest = namespace_digest
        self.store = store
        self._registry = registry
        self._near = Consumers()
        self._others: dict[str, dict[str, int]] = {}
        self._refreshed_at = float("-inf")

    async def find(self) -> Consumers:
        """Encoders at this encoder's store, itself included, with their announced speeds."""
        await self._refresh()
        return self._near

    async def find_others(self) -> Mapping[str, Mapping[str, int]]:
        """Slots of the encoders at each other store."""
        await self._refresh()
        return self._others

    async def _refresh(self) -> None:
        if time.monotonic() - self._refreshed_at <= REFRESH_INTERVAL_S:
            return
        self._refreshed_at = time.monotonic()
        try:
            records = await self._registry.list_instances()
        except BusUnavailableError as error:
            log.warning("encoders not refreshed from the registry", error=str(error))
            return
        encoders = [each for each in records if self._takes_jobs(each)]
        near = [each for each in encoders if store_of(each) == self.store]
        self._near = Consumers({each.instance: Peer(each.row_s, each.num_slots) for each in near})
        self._others = {}
        for each in encoders:
            if store_of(each) != self.store:
                self._others.setdefault(store_of(each), {})[each.instance] = each.num_slots

    def _takes_jobs(self, record: InstanceRecord) -> bool:
        is_of_namespace = record.namespace_digest == self.namespace_digest
        return record.role is Role.ENCODE and is_of_namespace and not record.draining
