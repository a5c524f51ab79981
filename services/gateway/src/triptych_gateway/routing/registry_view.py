"""What this gateway knows of the other instances: read from the registry again and again, kept in between.

Heartbeats are keys with a time to live, so there is nothing to wait on but time. While Redis is away
the last view stays in use: text requests need no Redis.
"""

import asyncio
import time

from triptych_common.coordination import Registry
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import InstanceRecord
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.routing.router import ENCODING_ROLES, SERVING_ROLES

log = get_logger(__name__)

_STALE_INTERVALS = 6


class RegistryView:
    """The records as last read, and a wake-up for requests that wait for an instance to register."""

    def __init__(self, registry: Registry, interval_s: float) -> None:
        self._registry = registry
        self.interval_s = interval_s
        self._changed = asyncio.Condition()
        self._seen_at = float("-inf")  # monotonic seconds of the last read that succeeded
        self.records: tuple[InstanceRecord, ...] = ()
        self.models_seen: set[str] = set()

    @property
    def is_fresh(self) -> bool:
        """The last read succeeded, not long ago."""
        return time.monotonic() - self._seen_at < self.interval_s * _STALE_INTERVALS + 1.0

    @property
    def serving(self) -> list[InstanceRecord]:
        return [r for r in self.records if r.role in SERVING_ROLES and not r.draining]

    @property
    def encoding(self) -> list[InstanceRecord]:
        return [r for r in self.records if r.role in ENCODING_ROLES and not r.draining]

    @property
    def models(self) -> list[str]:
        """Names that are served now, sorted."""
        return sorted({record.model for record in self.serving if record.model is not None})

    async def refresh(self) -> None:
        try:
            async with asyncio.timeout(max(self.interval_s * _STALE_INTERVALS, 1.0)):
                records = tuple(await self._registry.list_instances())
        except (BusUnavailableError, TimeoutError) as error:
            log.warning("registry not reachable", error=repr(error))
            return
        self._seen_at = time.monotonic()
        async with self._changed:
            self.records = records
            self.models_seen.update(self.models)
            self._changed.notify_all()

    async def wait_for_refresh(self) -> None:
        """Return after the next read that succeeds. Bound it."""
        async with self._changed:
            await self._changed.wait()

    def has_encoder(self, namespace_digest: str) -> bool:
        """An encoder of this namespace is registered."""
        return any(record.namespace_digest == namespace_digest for record in self.encoding)

    async def wait_for_encoder(self, namespace_digest: str) -> None:
        """Return once an encoder of this namespace is registered. Bound it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.has_encoder(namespace_digest))
