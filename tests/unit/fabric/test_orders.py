"""The end of an agent: results go out, or are given up in bounded time where Redis is away."""

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import EncodeClass
from triptych_common.protocol.names import StreamNames
from triptych_common.protocol.transfers import TransferFailed, TransferFailureKind, TransferOrder
from triptych_fabric.orders import OrderReader
from triptych_fabric.sender.transfers import PlacedOrder

LONG_S = 600.0
ORDER = TransferOrder(
    transfer_id="t-1",
    mm_hash="ab" * 32,
    entries=("ab" * 32,),
    source="store-a",
    target="store-b",
    gateway="gateway-0",
    encode_class=EncodeClass.BATCH,
)
FAILED = TransferFailed(
    transfer_id="t-1",
    mm_hash="ab" * 32,
    source="store-a",
    target="store-b",
    kind=TransferFailureKind.UNREACHABLE,
)


class FakeBus:
    """Takes results, or is away."""

    def __init__(self, *, is_away: bool) -> None:
        self.names = StreamNames("test")
        self.num_published = 0
        self._is_away = is_away

    def consumer(self, *args: Any, **options: Any) -> SimpleNamespace:
        return SimpleNamespace()

    async def publish_encoded(self, entries: Sequence[Any]) -> list[Any]:
        if self._is_away:
            raise BusUnavailableError("away")
        self.num_published += 1
        return []


@pytest.mark.parametrize("is_away", [False, True])
async def test_the_end_waits_for_results_no_longer_than_its_limit(is_away: bool) -> None:
    bus = FakeBus(is_away=is_away)
    ended: list[None] = []
    placed = PlacedOrder(ORDER, time.monotonic() + LONG_S, None, lambda: ended.append(None))
    async with asyncio.timeout(10.0), asyncio.TaskGroup() as group:  # the group ends with its tasks
        reader = OrderReader(cast(Any, bus), "fabric-a", group)
        reader.on_result(placed, FAILED)
        await reader.finish_sending(0.05 if is_away else LONG_S)
        assert ended == [None]
        reader.on_result(placed, FAILED)
    assert bus.num_published == (0 if is_away else 1)
