"""The jobs stream, seen as a queue with a bound."""

import time

from triptych_common.bus import AsyncBus
from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import EncodeJob

LOOK_INTERVAL_S = 0.1


class JobQueue:
    """Publishes jobs unless too many wait already. Looks at the stream's length now and then.

    The bound is soft: gateways do not see each other's jobs of the last `LOOK_INTERVAL_S`.
    """

    def __init__(self, bus: AsyncBus, stream: str, max_jobs: int) -> None:
        self._bus = bus
        self._stream = stream
        self._max_jobs = max_jobs
        self._num_jobs = 0
        self._looked_at = float("-inf")  # monotonic seconds

    async def put(
        self, job: EncodeJob, *, traceparent: str | None, remaining_ms: int, blob: bytes | None
    ) -> None:
        """Publish `job`.

        Raises:
            RequestError: 429, the queue is full.
            BusUnavailableError: Redis cannot be reached.
        """
        if time.monotonic() - self._looked_at >= LOOK_INTERVAL_S:
            self._num_jobs = await self._bus.stream_length(self._stream)
            self._looked_at = time.monotonic()
        if self._num_jobs >= self._max_jobs:
            raise RequestError(
                429, "encode_queue_full", "too many media wait for an encoder; try again shortly", None
            )
        self._num_jobs += 1
        await self._bus.publish(
            self._stream, job, traceparent=traceparent, remaining_ms=remaining_ms, blob=blob
        )
