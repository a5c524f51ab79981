"""The real gateway of several stores: `TransferOrders` with all behind it, `EncodeStores`, `ItemPlaces`.

What it knows of instances is the registry as it was last read: the world decides when it is read again.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

from tests.support.protocol_world.gateway import METRICS, RegistryGateway
from tests.support.protocol_world.network import AsyncBusModel
from triptych_common.coordination import NotedPlace
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import Message
from triptych_common.protocol.transfers import EntryPlace
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.locality.encode_stores import EncodeStores
from triptych_gateway.locality.item_places import ItemPlaces
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.settings import TransferSettings
from triptych_gateway.transfers.fabric_view import FabricView, LinkRates
from triptych_gateway.transfers.place_finder import DirectoryNotes
from triptych_gateway.transfers.transfer_orders import TransferOrders

MAX_TRANSFERS = 3  # `max_transfer_attempts`
GRACE_S = 2.0  # `transfer_grace_s`


class DirectoryModel:
    """`EntryDirectory` of one process. Redis answers at once: what it says is old at any time."""

    def __init__(self, bus: AsyncBusModel) -> None:
        self._bus = bus

    @property
    def _places(self) -> dict[MmHash, tuple[EntryPlace, ...]]:
        return {} if self._bus.network is None else self._bus.network.places

    async def find(self, mm_hashes: Sequence[MmHash]) -> dict[MmHash, tuple[EntryPlace, ...]]:
        return {each: self._places[each] for each in mm_hashes if each in self._places}

    async def add(self, noted: Sequence[NotedPlace]) -> None:
        for each in noted:
            others = [old for old in self._places.get(each.mm_hash, ()) if old.store != each.place.store]
            self._places[each.mm_hash] = (each.place, *others)

    async def remove(self, noted: Sequence[NotedPlace]) -> None:
        for each in noted:
            gone = (each.place.store, each.place.generation)
            left = [old for old in self._places.get(each.mm_hash, ()) if (old.store, old.generation) != gone]
            self._places.pop(each.mm_hash, None)
            if left:
                self._places[each.mm_hash] = tuple(left)


class TransferGateway(RegistryGateway):
    """One gateway of several stores."""

    def _find_stores(self) -> tuple[EncodeStores, ItemPlaces]:
        self.view = RegistryView(cast("Any", self), 1.0)
        self.read_registry()
        self.fabric, self.rates = FabricView(self.view), LinkRates()
        stores = EncodeStores(
            lambda: self.view.records, settings=TransferSettings(), measured_s=self.rates.measured_s
        )
        return stores, ItemPlaces(lambda: self.fabric.are_apart)

    def start(self) -> None:
        super().start()
        self.transfers = TransferOrders(
            bus=self.bus,
            gateway=self.name,
            fabric=self.fabric,
            orders=self.orders,
            notes=DirectoryNotes(cast("Any", DirectoryModel(self.bus)), 5.0),
            rates=self.rates,
            settings=TransferSettings(
                max_transfer_attempts=MAX_TRANSFERS, transfer_grace_s=GRACE_S, publish_timeout_s=5.0
            ),
            metrics=METRICS,
        )
        transfers = self.transfers  # its tasks, as `run` has them
        for work in (transfers._follow_places(), transfers._notes.run()):
            self.loop.run(partial(self.loop.create_task, work))
        self.loop.run(lambda: self.loop.keep_up(transfers._follow_time(), self._has_to_follow))

    def _has_to_follow(self) -> bool:
        """Is something ordered, or due?"""
        table = self.transfers.table
        return bool(table.num_ordered) or table.next_due() != float("inf")

    @property
    def is_outdated(self) -> bool:
        """The registry is not what was read."""
        return self.view.records != tuple(self._list_records())

    # ---- one request -----------------------------------------------------------------------------
    @asynccontextmanager
    async def _open_wait(self, item_wait: ItemWait) -> AsyncIterator[None]:
        item_wait.on_entries_read(await self.transfers.places.read(item_wait.mm_hashes))
        async with super()._open_wait(item_wait):
            with self.transfers.hold(item_wait):
                yield

    async def _bring(self, item_wait: ItemWait, name: str) -> None:
        record = next((each for each in self._list_records() if each.instance == name), None)
        if record is not None:  # else it cannot be reached
            await self.transfers.bring(item_wait, record)

    async def _on_result(self, message: Message) -> None:
        if not self.transfers.on_result(message):
            await super()._on_result(message)
