"""Sizes of items in a gateway's memory and in the one that gateways share."""

from typing import Any

import pytest

from tests.support.message_samples import cache_metadata
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncoderCacheMetadata, Modality
from triptych_gateway.encode.encode_admission import EncodeAdmission, JobQueue
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.item_queue import ItemQueue
from triptych_gateway.encode.item_table import ItemTable
from triptych_gateway.encode.job_window import Capacity, JobWindow
from triptych_gateway.encode.sizes import ItemSizes, SizesCache
from triptych_gateway.locality.encode_stores import EncodeStores
from triptych_gateway.locality.item_places import ItemPlaces
from triptych_gateway.settings import TransferSettings

HASH = MmHash("a" * 64)


class Shared:
    """`SharedSizes`: keeps all."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.num_writes = 0

    async def get(self, mm_hash: str) -> bytes | None:
        return self.values.get(mm_hash)

    async def set(self, mm_hash: str, value: bytes) -> bool:
        self.num_writes += 1
        self.values[mm_hash] = value
        return True


@pytest.fixture
def shared() -> Shared:
    return Shared()


def gateway(shared: Any) -> tuple[EncodeOrders, SizesCache]:
    orders, sizes = object.__new__(EncodeOrders), SizesCache(shared, max_items=10)
    orders.sizes, orders.table, orders._item_waits = sizes, ItemTable(), {}
    orders.places = ItemPlaces(lambda: False)
    orders._stores = EncodeStores(tuple, settings=TransferSettings())
    orders.queue = ItemQueue(JobWindow(lambda digest: Capacity(1, 0, 1)))
    orders.admission = EncodeAdmission(JobQueue(10, 30.0), orders.queue, orders._stores)
    return orders, sizes


def metadata(pieces: tuple[int, ...]) -> EncoderCacheMetadata:
    return cache_metadata(mm_hash=HASH, modality=Modality.VIDEO, num_embeds=6, sealed=True, pieces=pieces)


async def test_gateways_share_how_an_item_is_divided_now(shared: Shared) -> None:
    """An encoder that started again divides otherwise than the entry says."""
    orders, sizes = gateway(shared)
    await orders.on_encode_result(metadata((3, 3)))
    _, of_other = gateway(shared)
    assert await of_other.fetch_shared(HASH) == ItemSizes.of(metadata((3, 3)))
    await orders.on_encode_result(metadata((2, 2, 2)))
    assert sizes.get_local(HASH) == ItemSizes.of(metadata((2, 2, 2)))
    _, of_third = gateway(shared)
    assert await of_third.fetch_shared(HASH) == ItemSizes.of(metadata((2, 2, 2)))


async def test_what_is_known_is_not_written_again(shared: Shared) -> None:
    orders, _ = gateway(shared)
    for _ in range(3):
        await orders.on_encode_result(metadata((3, 3)))
    assert shared.num_writes == 1
