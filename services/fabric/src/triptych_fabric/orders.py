"""Reads `TransferOrder`s from the agent's stream and publishes their results to gateways."""

import asyncio
import contextlib
import time

import tenacity

from triptych_common.bus import AsyncBus, Delivery
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol import codec
from triptych_common.protocol.names import OWNER_GROUP
from triptych_common.protocol.transfers import TransferOrder
from triptych_common.telemetry.logs import get_logger
from triptych_fabric.sender.transfers import PlacedOrder, Result, TransferTable

log = get_logger(__name__)

MAX_ORDERS = 1024  # in hand at once; more wait in the stream
DEFAULT_DEADLINE_S = 60.0
RESULT_GRACE_S = 30.0  # after an order's deadline its gateway still uses the result
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 1.0


class OrderReader:
    """Reads orders; each stays in the stream until it is answered, so a restarted agent finds it again."""

    def __init__(self, bus: AsyncBus, instance: str, group: asyncio.TaskGroup) -> None:
        self._bus = bus
        self._group = group
        self._consumer = bus.consumer(
            bus.names.transfers(instance), group=OWNER_GROUP, consumer=instance, prefetch=MAX_ORDERS
        )
        self._sending: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    async def run(self, table: TransferTable) -> None:
        """Read orders until `stop` and `finish_sending`."""
        async with self._consumer:
            async for delivery in self._consumer:
                self._on_delivery(delivery, table)
            await self._ended.wait()  # orders are acked until then

    def stop(self) -> None:
        """Stop accepting orders; running transfers continue."""
        self._consumer.stop()

    async def finish_sending(self, limit_s: float) -> None:
        """Return when every result is published, or drop the rest after `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._sending:
                    await asyncio.wait(self._sending)
        if self._sending:
            log.warning("transfer results given up at the end", num_results=len(self._sending))
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        self._ended.set()

    def on_result(self, placed: PlacedOrder, result: Result) -> None:
        if self._ended.is_set():
            return
        task = self._group.create_task(self._send(placed, result))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def _on_delivery(self, delivery: Delivery, table: TransferTable) -> None:
        envelope = delivery.envelope
        if not isinstance(envelope.message, TransferOrder):
            delivery.ack_soon()
            return
        deadline = envelope.deadline or envelope.received_at + DEFAULT_DEADLINE_S
        table.add(PlacedOrder(envelope.message, deadline, envelope.traceparent, delivery.ack_soon))

    async def _send(self, placed: PlacedOrder, result: Result) -> None:
        try:
            if placed.order.gateway is not None:
                await self._publish(placed, result)
        finally:
            placed.done()

    async def _publish(self, placed: PlacedOrder, result: Result) -> None:
        """Publish a result; waits while Redis is unreachable, not for a gateway that does not read."""
        stream = self._bus.names.encode_results(placed.order.gateway or "")
        fields = codec.encode(result, traceparent=placed.traceparent)
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(BusUnavailableError),
            wait=tenacity.wait_exponential(multiplier=FIRST_RETRY_S, max=LONGEST_RETRY_S),
            stop=tenacity.stop_before_delay(max(1.0, placed.deadline + RESULT_GRACE_S - time.monotonic())),
            reraise=True,
        )
        try:
            await retrying(self._append, stream, fields)
        except BusUnavailableError as error:
            log.warning("transfer result given up", stream=stream, type=result.TYPE, error=str(error))

    async def _append(self, stream: str, fields: dict[bytes, bytes]) -> None:
        for refused in await self._bus.publish_encoded([(stream, fields)]):
            if not refused.is_final:
                raise refused.error
            log.warning(
                "transfer result given up",
                stream=stream,
                type=fields[b"type"].decode(),
                error=str(refused.error),
            )
