"""FAKE: stores as sets of entries, and fabric agents that read their stream. Real ones: cache_store's."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.support.gateway.fake_prefill_decode import send_encode_needed
from tests.support.waiting import until
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registration, Registry
from triptych_common.domain.hashing import entry_hashes
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import (
    ECTransferParams,
    FabricEndpoint,
    FabricTransport,
    InstanceRecord,
    ItemTransfer,
    Role,
)
from triptych_common.protocol.names import OWNER_GROUP
from triptych_common.protocol.transfers import (
    TransferCompleted,
    TransferFailed,
    TransferFailureKind,
    TransferOrder,
)

SILENT = "silent"  # instead of a failure: no word of it ever comes
NUM_BYTES = 4096  # of each entry


class FakeStores:
    """What each store has: `held[store]` is a set of mm_hashes."""

    def __init__(self) -> None:
        self.held: defaultdict[str, set[str]] = defaultdict(set)
        self.asking = asyncio.Lock()  # nothing arrives between a look for an item and what asks for it

    async def until_held(self, store: str, entries: tuple[str, ...]) -> None:
        await until(lambda: self.held[store].issuperset(entries))

    async def wait_items(self, bus: AsyncBus, params: ECTransferParams, instance: str, store: str) -> None:
        """As a prefill_decode does: what its store lacks it asks its gateway for, once, and waits."""
        entries = [(item, _entries_of(item)) for item in params.items]
        async with self.asking:
            for item, own in entries:
                if not self.held[store].issuperset(own):
                    await send_encode_needed(bus, params.model_copy(update={"items": (item,)}), instance)
        await self.until_held(store, tuple(entry for _, own in entries for entry in own))


@dataclass
class FakeAgent:
    """Beside `store`. It pushes what it is told to, when its store has it, but for `failures`."""

    bus: AsyncBus
    stores: FakeStores
    store: str
    boot_id: str = "boot"
    generation: int = 1
    orders: list[TransferOrder] = field(default_factory=list)
    traceparents: list[str | None] = field(default_factory=list)
    failures: list[TransferFailureKind | str] = field(default_factory=list)  # of the next orders
    registration: Registration | None = None  # while it runs
    _pushes: set[asyncio.Task[None]] = field(default_factory=set)
    before_push: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: pushes wait here

    def __post_init__(self) -> None:
        self.before_push.set()

    @property
    def name(self) -> str:
        return f"fabric-{self.store}"

    def record(self) -> InstanceRecord:
        return InstanceRecord(
            instance=self.name,
            boot_id=self.boot_id,
            role=Role.FABRIC,
            store=self.store,
            fabric=FabricEndpoint(host="127.0.0.1", port=7420, generation=self.generation),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeAgent"]:
        registered = Registry(self.bus).keep_registered(self.record())
        async with registered as self.registration, asyncio.TaskGroup() as group:
            task = group.create_task(self._consume(group))
            try:
                yield self
            finally:
                task.cancel()
                for each in self._pushes:
                    each.cancel()

    async def _consume(self, group: asyncio.TaskGroup) -> None:
        stream = self.bus.names.transfers(self.name)
        async with self.bus.consumer(stream, group=OWNER_GROUP, consumer=self.name) as consumer:
            async for delivery in consumer:
                order = delivery.envelope.message
                assert isinstance(order, TransferOrder)
                assert order.source == self.store
                self.orders.append(order)
                self.traceparents.append(delivery.envelope.traceparent)
                self._pushes.add(group.create_task(self._push(order)))
                await delivery.ack()

    async def _push(self, order: TransferOrder) -> None:
        failure = self.failures.pop(0) if self.failures else None
        if failure == SILENT:
            return
        if isinstance(failure, TransferFailureKind):
            await self._tell(order, TransferFailed(**_ends(order), kind=failure, detail="a fake failure"))
            return
        await self.stores.until_held(self.store, order.entries)
        await self.before_push.wait()
        async with self.stores.asking:
            self.stores.held[order.target].update(order.entries)
        num_bytes = NUM_BYTES * len(order.entries)
        completed = TransferCompleted(
            **_ends(order), transport=FabricTransport.TCP, num_bytes=num_bytes, transfer_s=0.001
        )
        await self._tell(order, completed)

    async def _tell(self, order: TransferOrder, message: TransferCompleted | TransferFailed) -> None:
        assert order.gateway is not None
        await self.bus.publish(self.bus.names.encode_results(order.gateway), message)


def _entries_of(item: ItemTransfer) -> tuple[str, ...]:
    return entry_hashes(MmHash(item.mm_hash), () if item.record is None else item.record.pieces)


def _ends(order: TransferOrder) -> dict[str, str]:
    return order.model_dump(include={"transfer_id", "mm_hash", "source", "target"})
