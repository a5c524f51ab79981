"""The gateway of a test: sends orders to agents, and waits for what comes of them."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.support.fabric.fabric_host import FabricHost
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import EncodeClass, InstanceRecord
from triptych_common.protocol.names import OWNER_GROUP
from triptych_common.protocol.transfers import (
    TransferCompleted,
    TransferFailed,
    TransferFailureKind,
    TransferOrder,
)

Result = TransferCompleted | TransferFailed


@asynccontextmanager
async def ordering_gateway(redis_url: str) -> "AsyncIterator[OrderingGateway]":
    """One that reads results until the block ends."""
    async with await AsyncBus.connect(redis_url, "test", client_name="gateway-0") as bus:
        gateway = OrderingGateway(bus)
        reading = asyncio.get_running_loop().create_task(gateway.run())
        try:
            yield gateway
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading


NAME = "gateway-0"


class OrderingGateway:
    """For one event loop; `run` reads results while the test goes on."""

    def __init__(self, bus: AsyncBus) -> None:
        self.bus = bus
        self._results: dict[str, asyncio.Future[Result]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        stream = self.bus.names.encode_results(NAME)
        async with self.bus.consumer(stream, group=OWNER_GROUP, consumer=NAME, prefetch=64) as consumer:
            async for delivery in consumer:
                message = delivery.envelope.message
                assert isinstance(message, TransferCompleted | TransferFailed)
                future = self._results.get(message.transfer_id)
                if future is not None and not future.done():
                    future.set_result(message)
                delivery.ack_soon()

    async def order(
        self,
        source: FabricHost,
        target: FabricHost | str,
        *entries: str,
        ttl_ms: int = 20_000,
        encode_class: EncodeClass = EncodeClass.INTERACTIVE,
        traceparent: str | None = None,
    ) -> "asyncio.Future[Result]":
        """Send one; its result comes later."""
        transfer_id = uuid.uuid4().hex
        future = self._results[transfer_id] = asyncio.get_running_loop().create_future()
        order = TransferOrder(
            transfer_id=transfer_id,
            mm_hash=entries[0],
            entries=entries,
            source=source.store_name,
            target=target if isinstance(target, str) else target.store_name,
            gateway=NAME,
            encode_class=encode_class,
        )
        stream = self.bus.names.transfers(source.agent.instance)
        await self.bus.publish(stream, order, remaining_ms=ttl_ms, traceparent=traceparent)
        return future

    async def transfer(
        self, source: FabricHost, target: FabricHost | str, *entries: str, ttl_ms: int = 20_000
    ) -> Result:
        future = await self.order(source, target, *entries, ttl_ms=ttl_ms)
        return await asyncio.wait_for(future, ttl_ms / 1000 + 20)

    async def list_instances(self) -> list[InstanceRecord]:
        """What is registered now."""
        return await Registry(self.bus).list_instances()


def completed(result: Result) -> TransferCompleted:
    assert isinstance(result, TransferCompleted), result
    return result


def failed(result: Result) -> TransferFailureKind:
    assert isinstance(result, TransferFailed), result
    return result.kind
