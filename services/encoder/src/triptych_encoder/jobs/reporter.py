"""Publishes EncoderCacheMetadata (sizes), EncodeCompleted and EncodeFailed, in the job's own trace."""

import asyncio
import time
from collections.abc import Iterable

import tenacity

from triptych_common.bus import AsyncBus
from triptych_common.domain.errors import BusUnavailableError, StreamFullError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import (
    EncodeCompleted,
    EncodeFailed,
    EncodeJob,
    EncoderCacheMetadata,
    Message,
    Requester,
)
from triptych_common.protocol.names import StreamNames
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 1.0
DEFAULT_DEADLINE_S = 60.0


class Reporter:
    """Waits for a Redis that is away, or full, until the job's deadline.

    Then no requester waits for the message any more: it is given up, and the encoder goes on.
    """

    def __init__(self, bus: AsyncBus, names: StreamNames, instance: str) -> None:
        self._bus = bus
        self._names = names
        self._instance = instance

    async def send_metadata(self, metadata: EncoderCacheMetadata, envelope: Envelope) -> None:
        """To every waiting prefill_decode, then to every waiting gateway."""
        consumers = _distinct(requester.prefill_decode for requester in metadata.requesters)
        await self._publish([self._names.metadata(name) for name in consumers], metadata, envelope)
        await self._publish(self._gateways(metadata.requesters), metadata, envelope)

    async def send_completed(
        self, job: EncodeJob, envelope: Envelope, encode_s: float, requesters: Iterable[Requester]
    ) -> None:
        """To the gateways of `requesters`."""
        message = EncodeCompleted(
            job_id=job.job_id, mm_hash=job.mm_hash, encoder=self._instance, encode_s=encode_s
        )
        await self._publish(self._gateways(requesters), message, envelope)

    async def send_failed(
        self, failure: EncodeFailed, envelope: Envelope, requesters: Iterable[Requester]
    ) -> None:
        """To the gateways of `requesters`."""
        await self._publish(self._gateways(requesters), failure, envelope)

    def _gateways(self, requesters: Iterable[Requester]) -> list[str]:
        return [self._names.encode_results(name) for name in _distinct(each.gateway for each in requesters)]

    async def _publish(self, streams: list[str], message: Message, envelope: Envelope) -> None:
        """To all streams at once: one that cannot be written does not keep the others back."""
        deadline = envelope.deadline or time.monotonic() + DEFAULT_DEADLINE_S
        await asyncio.gather(*(self._publish_one(stream, message, envelope, deadline) for stream in streams))

    async def _publish_one(self, stream: str, message: Message, envelope: Envelope, deadline: float) -> None:
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(_may_pass),
            wait=tenacity.wait_exponential(multiplier=FIRST_RETRY_S, max=LONGEST_RETRY_S),
            stop=tenacity.stop_before_delay(deadline - time.monotonic()),
            reraise=True,
        )
        try:
            await retrying(self._bus.publish, stream, message, traceparent=envelope.traceparent)
        except BusUnavailableError as error:
            log.warning("message given up", stream=stream, type=message.TYPE, error=str(error))


def _may_pass(error: BaseException) -> bool:
    """Not a full stream: its reader has stopped, and would read the message too late."""
    return isinstance(error, BusUnavailableError) and not isinstance(error, StreamFullError)


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
