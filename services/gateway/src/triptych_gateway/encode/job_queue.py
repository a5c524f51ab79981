"""The jobs of each namespace, seen as a queue with bounds."""

import time
from dataclasses import dataclass

from cachetools import LRUCache

from triptych_common.coordination import SingleFlight
from triptych_common.domain.errors import RequestError

LOOK_INTERVAL_S = 0.1
MAX_NAMESPACES = 64  # that are remembered; each is served by engines of its own


@dataclass
class _Look:
    """What was seen of a namespace's jobs."""

    num_jobs: int = 0
    oldest_s: float = 0.0
    at: float = float("-inf")  # monotonic seconds


class JobQueue:
    """Refuses what would wait too long: looks at the stream's length, and at its oldest job, now and then.

    Each namespace has bounds of its own: its encoders take no others' jobs. They are soft: gateways do not
    see each other's jobs of the last `LOOK_INTERVAL_S`.
    """

    def __init__(self, inflight: SingleFlight, max_jobs: int, max_age_s: float) -> None:
        self._inflight = inflight
        self._max_jobs = max_jobs
        self._max_age_s = max_age_s
        self._looks: LRUCache[str, _Look] = LRUCache(MAX_NAMESPACES)

    async def admit(self, namespace_digest: str) -> None:
        """Make room for one more job of the namespace.

        Raises:
            RequestError: 429, too many jobs, or one that no encoder took for too long.
            BusUnavailableError: Redis cannot be reached.
        """
        look = self._looks.get(namespace_digest) or _Look()
        if time.monotonic() - look.at >= LOOK_INTERVAL_S:
            num_jobs, oldest_s = await self._inflight.read_backlog(namespace_digest)
            look = self._looks[namespace_digest] = _Look(num_jobs, oldest_s, time.monotonic())
        if look.num_jobs >= self._max_jobs:
            raise RequestError(
                429, "encode_queue_full", "too many media wait for an encoder; try again shortly", None
            )
        if look.oldest_s >= self._max_age_s:
            raise RequestError(
                429, "encode_queue_slow", "media wait too long for an encoder; try again shortly", None
            )
        look.num_jobs += 1
