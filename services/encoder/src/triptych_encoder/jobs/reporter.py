"""Publishes EncoderCacheMetadata (sizes), EncodeCompleted and EncodeFailed, in the job's own trace."""

import time
from collections.abc import Iterable

import tenacity

from triptych_common.bus import AsyncBus
from triptych_common.bus.publisher import NewEntry
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol import codec
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
    """Publishes messages, waiting for an unreachable or full Redis until the job's deadline.

    After that no requester waits: the message is dropped.
    """

    def __init__(self, bus: AsyncBus, names: StreamNames, instance: str) -> None:
        self._bus = bus
        self._names = names
        self._instance = instance

    async def send_metadata(self, metadata: EncoderCacheMetadata, envelope: Envelope) -> None:
        """Send to every waiting prefill_decode, then to every waiting gateway, in one round trip."""
        consumers = _distinct(requester.prefill_decode for requester in metadata.requesters)
        streams = [*map(self._names.metadata, consumers), *self._gateways(metadata.requesters)]
        await self._publish(streams, metadata, envelope)

    async def send_completed(
        self, job: EncodeJob, envelope: Envelope, encode_s: float, requesters: Iterable[Requester]
    ) -> None:
        message = EncodeCompleted(
            job_id=job.job_id, mm_hash=job.mm_hash, encoder=self._instance, encode_s=encode_s
        )
        await self._publish(self._gateways(requesters), message, envelope)

    async def send_failed(
        self, failure: EncodeFailed, envelope: Envelope, requesters: Iterable[Requester]
    ) -> None:
        await self._publish(self._gateways(requesters), failure, envelope)

    def _gateways(self, requesters: Iterable[Requester]) -> list[str]:
        return [self._names.encode_results(name) for name in _distinct(each.gateway for each in requesters)]

    async def _publish(self, streams: list[str], message: Message, envelope: Envelope) -> None:
        """Publish to all streams in one round trip; a stream that refuses does not hold up the others."""
        if not streams:
            return
        deadline = envelope.deadline or time.monotonic() + DEFAULT_DEADLINE_S
        fields = codec.encode(message, traceparent=envelope.traceparent)
        unsent: list[NewEntry] = [(stream, fields) for stream in streams]
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(BusUnavailableError),
            wait=tenacity.wait_exponential(multiplier=FIRST_RETRY_S, max=LONGEST_RETRY_S),
            stop=tenacity.stop_before_delay(deadline - time.monotonic()),
            reraise=True,
        )
        try:
            await retrying(self._send, unsent, message)
        except BusUnavailableError as error:
            for stream, _ in unsent:
                _log_given_up(stream, message, error)

    async def _send(self, unsent: list[NewEntry], message: Message) -> None:
        """Send `unsent`, and leave in it what was refused and may be retried.

        A full stream is not retried: its reader has stopped, and would read the message too late.

        Raises:
            BusUnavailableError: some are left.
        """
        refused = await self._bus.publish_encoded(unsent)
        for each in refused:
            if each.is_final:
                _log_given_up(each.entry[0], message, each.error)
        left = [each for each in refused if not each.is_final]
        unsent[:] = [each.entry for each in left]
        if left:
            raise left[0].error


def _log_given_up(stream: str, message: Message, error: BusUnavailableError) -> None:
    log.warning("message given up", stream=stream, type=message.TYPE, error=str(error))


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
