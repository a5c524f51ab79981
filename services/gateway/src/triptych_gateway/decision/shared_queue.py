"""SharedQueue: the jobs of other gateways, which this one does not see. Read from Redis, and only where there
are others: of its own jobs a gateway knows the rows too."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cachetools import LRUCache

from triptych_common.coordination import Backlog
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

READ_INTERVAL_S = 0.1
READ_LIMIT_S = 0.2  # a decision does not wait for a slow Redis
MAX_NAMESPACES = 64


@dataclass(frozen=True, slots=True)
class _Read:
    num_others: int = 0
    at: float = float("-inf")  # monotonic seconds


class SharedQueue:
    """Reader of the backlogs, every `READ_INTERVAL_S` at most per namespace."""

    def __init__(self, read_backlog: Callable[[str], Awaitable[Backlog]]) -> None:
        """Store the reader of a namespace's backlog by digest."""
        self._read_backlog = read_backlog
        self._reads: LRUCache[str, _Read] = LRUCache(MAX_NAMESPACES)

    async def num_others(self, namespace_digest: str, num_own: int) -> int:
        """Return the jobs on the namespace's streams beyond the `num_own` that this gateway published.

        Returns 0 when Redis does not answer in time.
        """
        known = self._reads.get(namespace_digest, _Read())
        if time.monotonic() - known.at < READ_INTERVAL_S:
            return known.num_others
        num_others = 0
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                num_jobs, _ = await self._read_backlog(namespace_digest)
                num_others = max(0, num_jobs - num_own)
        except (BusUnavailableError, TimeoutError) as error:
            log.info("jobs of other gateways not read", error=repr(error))
        self._reads[namespace_digest] = _Read(num_others, time.monotonic())
        return num_others
