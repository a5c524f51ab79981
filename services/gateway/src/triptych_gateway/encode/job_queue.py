"""Limits of each namespace's jobs stream: a new job is refused while too many wait, or one waits too long."""

import time
from dataclasses import dataclass

from cachetools import LRUCache

from triptych_common.coordination import SingleFlight
from triptych_common.domain.errors import RequestError

READ_INTERVAL_S = 0.1
MAX_NAMESPACES = 64  # that are remembered; each is served by engines of its own


@dataclass
class _Backlog:
    """What was read of a namespace's jobs."""

    num_jobs: int = 0
    oldest_s: float = 0.0
    read_at: float = float("-inf")  # monotonic seconds


class JobQueue:
    """Refuses what would wait too long, by the stream's length and the age of its oldest job.

    Each namespace has bounds of its own: its encoders take no others' jobs. They are soft: gateways do not
    see each other's jobs of the last `READ_INTERVAL_S`.
    """

    def __init__(self, single_flight: SingleFlight, max_jobs: int, max_age_s: float) -> None:
        self._single_flight = single_flight
        self._max_jobs = max_jobs
        self._max_age_s = max_age_s
        self._backlogs: LRUCache[str, _Backlog] = LRUCache(MAX_NAMESPACES)

    async def admit_job(self, namespace_digest: str) -> None:
        """Make room for one more job of the namespace.

        Raises:
            RequestError: 429, too many jobs, or one that no encoder took for too long.
            BusUnavailableError: Redis cannot be reached.
        """
        backlog = self._backlogs.get(namespace_digest) or _Backlog()
        if time.monotonic() - backlog.read_at >= READ_INTERVAL_S:
            num_jobs, oldest_s = await self._single_flight.read_backlog(namespace_digest)
            backlog = self._backlogs[namespace_digest] = _Backlog(num_jobs, oldest_s, time.monotonic())
        if backlog.num_jobs >= self._max_jobs:
            message = "too many media wait for an encoder; try again shortly"
            raise RequestError(429, "encode_queue_full", message)
        if backlog.oldest_s >= self._max_age_s:
            message = "media wait too long for an encoder; try again shortly"
            raise RequestError(429, "encode_queue_slow", message)
        backlog.num_jobs += 1
