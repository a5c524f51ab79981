"""Reads the consumers' replies (`preallocations`, `acks`), and ends the producer's pins."""

import asyncio
import time

from triptych_common.bus import AsyncBus
from triptych_common.protocol.messages import Decision, ItemAck, Preallocation
from triptych_common.protocol.names import OWNER_GROUP, StreamNames
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.store.store_client import StoreClient

EXPIRY_CHECK_S = 5.0  # pins of requests that never answered; time to live, not a wake-up


class ReplyReader:
    """Applies messages from the bus to the ledger."""

    def __init__(
        self, bus: AsyncBus, names: StreamNames, instance: str, ledger: Ledger, store_client: StoreClient
    ) -> None:
        self._bus = bus
        self._names = names
        self._instance = instance
        self._ledger = ledger
        self._store_client = store_client
        self._changed = asyncio.Event()

    async def wait_settled(self) -> None:
        """Return when no requester's final ack is outstanding; needs `run`, and a timeout of the caller's."""
        while len(self._ledger):
            self._changed.clear()
            await self._changed.wait()

    async def run(self) -> None:
        """Read replies and expire pins until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(self._names.preallocations(self._instance)))
            group.create_task(self._read(self._names.acks(self._instance)))
            group.create_task(self._expire())

    async def _read(self, stream: str) -> None:
        async with self._bus.consumer(
            stream, group=OWNER_GROUP, consumer=self._instance, prefetch=64
        ) as consumer:
            async for delivery in consumer:
                self.on_reply(delivery.envelope.message)
                self._changed.set()
                delivery.ack_soon()

    def on_reply(self, message: object) -> None:
        """Apply a reply; other messages are ignored."""
        match message:
            case Preallocation(decision=Decision.GRANTED):
                self._ledger.add_grant(message.mm_hash, (message.request_id, message.item_index))
            case Preallocation() | ItemAck():
                key = (message.request_id, message.item_index)
                self._store_client.end_pins(self._ledger.remove_requesters(message.mm_hash, {key}))

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_CHECK_S)
            self._store_client.end_pins(self._ledger.expire(time.monotonic()))
            self._changed.set()
