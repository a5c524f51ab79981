"""TransferOrders with everything around it faked: the registry, the directory, encoders and agents."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, cast

from tests.support.gateway.routing import record_of
from tests.support.message_samples import cache_metadata
from tests.support.waiting import until
from triptych_common.protocol.ids import MmHash, RequestId
from triptych_common.protocol.messages import (
    EncodeNeeded,
    FabricEndpoint,
    FabricTransport,
    InstanceRecord,
    Modality,
    Role,
)
from triptych_common.protocol.names import StreamNames
from triptych_common.protocol.transfers import (
    EntryPlace,
    TransferCompleted,
    TransferFailed,
    TransferFailureKind,
    TransferOrder,
)
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.locality.item_places import ItemPlaces
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.media import TakenItem
from triptych_gateway.settings import TransferSettings
from triptych_gateway.transfers.fabric_view import FabricView, LinkRates
from triptych_gateway.transfers.place_finder import DirectoryNotes
from triptych_gateway.transfers.transfer_orders import TransferOrders
from triptych_gateway.transfers.transfer_table import Transfer

A = MmHash("a" * 64)
TARGET, S1, S2 = "store-t", "store-1", "store-2"


def agent(
    store: str, boot_id: str = "b", transports: tuple[FabricTransport, ...] = (FabricTransport.TCP,)
) -> InstanceRecord:
    endpoint = FabricEndpoint(host="10.0.0.1", port=7420, generation=1, transports=transports)
    return record_of(f"fabric-{store}", role=Role.FABRIC, store=store, fabric=endpoint, boot_id=boot_id)


@dataclass
class World:
    """Everything around it, faked; `orders` are those that were published, in order."""

    records: tuple[InstanceRecord, ...] = field(
        default_factory=lambda: (
            record_of("pd-0", store=TARGET), record_of("pd-1", store=S2), agent(S1), agent(S2), agent(TARGET),
        )
    )  # fmt: skip
    directory: dict[MmHash, tuple[EntryPlace, ...]] = field(default_factory=dict)
    orders: list[TransferOrder] = field(default_factory=list)
    encoded_near: list[str | None] = field(default_factory=list)
    is_encoding: bool = False
    num_reads: int = 0
    before_find: asyncio.Event | None = None
    grace_s: float = 60.0
    names: StreamNames = field(default_factory=lambda: StreamNames("test"))

    def __post_init__(self) -> None:
        self.fabric = FabricView(cast("Any", self))
        self.places = ItemPlaces(lambda: self.fabric.are_apart)
        self.sizes = SimpleNamespace(get_local=lambda mm_hash: None)
        self.table = SimpleNamespace(get=lambda mm_hash: SimpleNamespace(in_flight=self.is_encoding))
        self.metrics = GatewayMetrics()
        self.transfers = TransferOrders(
            bus=cast("Any", self),
            gateway="gateway-0",
            fabric=self.fabric,
            orders=cast("Any", self),
            notes=DirectoryNotes(cast("Any", self), 5.0),
            rates=LinkRates(),
            settings=TransferSettings(
                max_transfer_attempts=3, transfer_grace_s=self.grace_s, publish_timeout_s=1.0
            ),
            metrics=self.metrics,
        )

    def order_near(self, mm_hash: MmHash, store: str | None) -> None:
        self.encoded_near.append(store)

    async def publish(self, stream: str, message: TransferOrder, **_: Any) -> None:
        assert stream == self.names.transfers(f"fabric-{message.source}")
        self.orders.append(message)

    async def find(self, entries: Sequence[MmHash]) -> dict[MmHash, tuple[EntryPlace, ...]]:
        self.num_reads += 1
        if self.before_find is not None:
            await self.before_find.wait()
        return {each: self.directory[each] for each in entries if each in self.directory}

    async def add(self, noted: Any) -> None:
        for each in noted:
            self.directory[each.mm_hash] = (each.place,)

    async def remove(self, noted: Any) -> None:
        for each in noted:
            places = self.directory.get(each.mm_hash, ())
            self.directory[each.mm_hash] = tuple(old for old in places if old.store != each.place.store)

    # ---- what comes ------------------------------------------------------------------------------
    def announce(self, store: str, *, sealed: bool = False) -> None:
        self.places.note_metadata(
            cache_metadata(mm_hash=A, num_embeds=6, store=store, sealed=sealed)
        )  # fmt: skip

    def complete(self, order: TransferOrder) -> None:
        ends = order.model_dump(include={"transfer_id", "mm_hash", "source", "target"})
        self.transfers.on_result(
            TransferCompleted(**ends, transport=FabricTransport.TCP, num_bytes=96, transfer_s=0.1)
        )

    def fail(self, order: TransferOrder, kind: TransferFailureKind) -> None:
        ends = order.model_dump(include={"transfer_id", "mm_hash", "source", "target"})
        self.transfers.on_result(TransferFailed(**ends, kind=kind))

    def need(self, reason: Literal["absent", "writer_lost", "evicted"] = "absent") -> bool:
        return self.transfers.on_result(
            EncodeNeeded(request_id="r", item_index=0, mm_hash=A, prefill_decode="pd-0", reason=reason)
        )

    def transfer(self, target: str = TARGET) -> Transfer:
        found = self.transfers.table.get(A, target)
        assert found is not None
        return found

    async def until_orders(self, number: int) -> TransferOrder:
        await until(lambda: len(self.orders) == number)
        return self.orders[-1]


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(world.transfers.run())
        yield world
        task.cancel()


def wait_of(request_id: str = "r") -> ItemWait:
    part = MediaPart(0, ("messages", 0, "content", 0), Modality.IMAGE, "", "part 0")
    item = TakenItem(part, A, b"x", None, {}, {})
    return ItemWait(RequestId(request_id), "pd-0", [item], time.monotonic() + 60, None, "d" * 64)
