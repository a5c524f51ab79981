"""EncoderReturn: check whether a namespace without an encoder had one lately, which may come back.

The evidence is the key `had-encoder:{namespace_digest}`: the namespace's encoders, of whatever store, set it
at their start and renew it with every heartbeat, and it is gone `JOBS_TTL_S` after the last of them. So it
outlives a restart of any service, this gateway's too, and it is not there where the deployment never had an
encoder.
"""

import asyncio
import time
from dataclasses import dataclass

from cachetools import LRUCache

from triptych_common.coordination import Registry
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

READ_INTERVAL_S = 1.0
READ_LIMIT_S = 1.0
MAX_NAMESPACES = 64


@dataclass(frozen=True, slots=True)
class _Read:
    may_return: bool = True
    at: float = float("-inf")  # monotonic seconds


class EncoderReturn:
    """Check used while no encoder is registered; reads Redis every `READ_INTERVAL_S` per namespace."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._reads: LRUCache[str, _Read] = LRUCache(MAX_NAMESPACES)

    async def may_return(self, namespace_digest: str) -> bool:
        """Return whether an encoder may come back, also if Redis does not answer: then requests wait."""
        known = self._reads.get(namespace_digest, _Read())
        if time.monotonic() - known.at < READ_INTERVAL_S:
            return known.may_return
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                may_return = await self._registry.had_encoder(namespace_digest)
        except (BusUnavailableError, TimeoutError) as error:
            log.info("recent encoders of a namespace not read", error=repr(error))
            may_return = True
        self._reads[namespace_digest] = _Read(may_return, time.monotonic())
        return may_return
