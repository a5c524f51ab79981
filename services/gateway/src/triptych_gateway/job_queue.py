"""The jobs stream, seen as a queue with bounds."""

import time

from triptych_common.bus import Inflight
from triptych_common.domain.errors import RequestError

LOOK_INTERVAL_S = 0.1


class JobQueue:
    """Refuses what would wait too long: looks at the stream's length, and at its oldest job, now and then.

    The bounds are soft: gateways do not see each other's jobs of the last `LOOK_INTERVAL_S`.
    """

    def __init__(self, inflight: Inflight, max_jobs: int, max_age_s: float) -> None:
        self._inflight = inflight
        self._max_jobs = max_jobs
        self._max_age_s = max_age_s
        self._num_jobs = 0
        self._oldest_s = 0.0
        self._looked_at = float("-inf")  # monotonic seconds

    async def admit(self) -> None:
        """Make room for one more job.

        Raises:
            RequestError: 429, too many jobs, or one that no encoder took for too long.
            BusUnavailableError: Redis cannot be reached.
        """
        if time.monotonic() - self._looked_at >= LOOK_INTERVAL_S:
            self._num_jobs, self._oldest_s = await self._inflight.backlog()
            self._looked_at = time.monotonic()
        if self._num_jobs >= self._max_jobs:
            raise RequestError(
                429, "encode_queue_full", "too many media wait for an encoder; try again shortly", None
            )
        if self._oldest_s >= self._max_age_s:
            raise RequestError(
                429, "encode_queue_slow", "media wait too long for an encoder; try again shortly", None
            )
        self._num_jobs += 1
