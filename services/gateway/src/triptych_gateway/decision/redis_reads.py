"""Facts in Redis for a decision, read at intervals: other gateways' jobs, and encoders that may return."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from cachetools import LRUCache

from triptych_common.coordination import Backlog, Registry
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

QUEUE_INTERVAL_S = 0.1
QUEUE_LIMIT_S = 0.2  # a decision does not wait for a slow Redis
RETURN_INTERVAL_S = 1.0
RETURN_LIMIT_S = 1.0
MAX_NAMESPACES = 64

Fact = TypeVar("Fact")


class _Reads(Generic[Fact]):
    """Latest reading of each namespace; `otherwise` stands for an answer that does not come in time."""

    def __init__(self, interval_s: float, otherwise: Fact) -> None:
        self._interval_s, self._otherwise = interval_s, otherwise
        self._found: LRUCache[str, tuple[Fact, float]] = LRUCache(MAX_NAMESPACES)  # with monotonic seconds

    async def get(self, digest: str, read: Callable[[], Awaitable[Fact]], limit_s: float) -> Fact:
        """Return the last reading of the namespace, or read again if that is too old."""
        fact, at = self._found.get(digest, (self._otherwise, float("-inf")))
        if time.monotonic() - at < self._interval_s:
            return fact
        fact = self._otherwise
        try:
            async with asyncio.timeout(limit_s):
                fact = await read()
        except (BusUnavailableError, TimeoutError) as error:
            log.info("facts for a decision not read", error=repr(error))
        self._found[digest] = fact, time.monotonic()
        return fact


class SharedQueue:
    """Jobs of other gateways, read only where there are others: of its own a gateway knows the rows too."""

    def __init__(self, read_backlog: Callable[[str], Awaitable[Backlog]]) -> None:
        """Store the reader of a namespace's backlog by digest."""
        self._read_backlog = read_backlog
        self._reads = _Reads(QUEUE_INTERVAL_S, 0)

    async def num_others(self, namespace_digest: str, num_own: int) -> int:
        """Return the jobs on the namespace's streams beyond the `num_own` that this gateway published.

        Returns 0 when Redis does not answer in time.
        """

        async def read() -> int:
            num_jobs, _ = await self._read_backlog(namespace_digest)
            return max(0, num_jobs - num_own)

        return await self._reads.get(namespace_digest, read, QUEUE_LIMIT_S)


class EncoderReturn:
    """Check whether a namespace without an encoder had one lately, which may come back.

    The evidence is the key `had-encoder:{namespace_digest}`: the namespace's encoders, of whatever store, set
    it at their start and renew it with every heartbeat, and it is gone `JOBS_TTL_S` after the last of them.
    So it outlives a restart of any service, this gateway's too, and it is not there where the deployment
    never had an encoder.
    """

    def __init__(self, registry: Registry, *, on_demand: bool = False) -> None:
        """Store the registry; `on_demand`: an encoder starts for requests, whenever the last was there."""
        self._registry, self._on_demand = registry, on_demand
        self._reads = _Reads(RETURN_INTERVAL_S, True)

    async def may_return(self, namespace_digest: str) -> bool:
        """Return whether an encoder may come back, also if Redis does not answer: then requests wait."""
        if self._on_demand:
            return True

        def read() -> Awaitable[bool]:
            return self._registry.had_encoder(namespace_digest)

        return await self._reads.get(namespace_digest, read, RETURN_LIMIT_S)
