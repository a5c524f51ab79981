"""Moving entries by orders to an agent, on real Redis; the agent is a stand-in that answers as it is told."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from triptych_cli.commands.hosts.mover import MAX_UNDER_WAY, Move, Mover, MoveResults
from triptych_common.bus import AsyncBus
from triptych_common.bus.inspection import find_streams
from triptych_common.protocol.messages import EncodeClass, FabricTransport, Message
from triptych_common.protocol.names import OWNER_GROUP
from triptych_common.protocol.transfers import (
    TransferCompleted,
    TransferFailed,
    TransferFailureKind,
    TransferOrder,
)

AGENT = "fabric-a"
Answer = Callable[[TransferOrder], Message | None]


def completed(order: TransferOrder) -> Message:
    return TransferCompleted(
        transfer_id=order.transfer_id, mm_hash=order.mm_hash, source=order.source, target=order.target,
        transport=FabricTransport.TCP, num_bytes=64, transfer_s=0.1,
    )  # fmt: skip


def failed(order: TransferOrder, kind: TransferFailureKind = TransferFailureKind.TARGET_FULL) -> Message:
    return TransferFailed(
        transfer_id=order.transfer_id, mm_hash=order.mm_hash, source=order.source, target=order.target,
        kind=kind,
    )  # fmt: skip


class StandInAgent:
    """Takes orders, and answers each by `answer`, once as many wait as are let through at once."""

    def __init__(self, bus: AsyncBus, answer: Answer, batch: int) -> None:
        self._bus, self._answer, self._batch = bus, answer, batch
        self.orders: list[TransferOrder] = []
        self.most_waiting = 0

    async def run(self) -> None:
        waiting: list[TransferOrder] = []
        stream = self._bus.names.transfers(AGENT)
        async with self._bus.consumer(stream, group=OWNER_GROUP, consumer=AGENT, prefetch=100) as consumer:
            async for delivery in consumer:
                order = delivery.envelope.message
                assert isinstance(order, TransferOrder)
                assert delivery.envelope.remaining_ms is not None, "an order has a deadline"
                self.orders.append(order)
                waiting.append(order)
                self.most_waiting = max(self.most_waiting, len(waiting))
                await delivery.ack()
                if len(waiting) >= self._batch:
                    for each in waiting:
                        assert each.gateway is not None
                        if (message := self._answer(each)) is not None:
                            await self._bus.publish(self._bus.names.encode_results(each.gateway), message)
                    waiting.clear()


@asynccontextmanager
async def agent(bus: AsyncBus, answer: Answer, batch: int = 1) -> AsyncIterator[StandInAgent]:
    stand_in = StandInAgent(bus, answer, batch)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(stand_in.run())
        yield stand_in
        task.cancel()


@pytest.fixture
async def bus(redis_url: str) -> AsyncIterator[AsyncBus]:
    async with await AsyncBus.connect(redis_url, "test", client_name="tests") as bus:
        yield bus


def moves(count: int) -> list[Move]:
    return [Move(f"{number:064x}", 64, "store-b") for number in range(count)]


async def moved(bus: AsyncBus, wanted: list[Move], within_s: float = 30.0) -> MoveResults:
    mover = Mover(bus, AGENT, "store-a", lambda results: None)
    await mover.move(wanted, time.monotonic() + within_s)
    assert not await find_streams(bus, "encode-results:"), "its stream is gone"
    return mover.results


async def test_all_are_ordered_in_turn_few_at_once(bus: AsyncBus) -> None:
    wanted = moves(3 * MAX_UNDER_WAY)
    async with agent(bus, completed, batch=MAX_UNDER_WAY) as stand_in:
        results = await moved(bus, wanted)
    assert results.num_moved == len(wanted)
    assert results.num_bytes == 64 * len(wanted)
    assert results.moved == {each.mm_hash: "store-b" for each in wanted}
    assert [each.mm_hash for each in stand_in.orders] == [each.mm_hash for each in wanted]
    assert stand_in.most_waiting == MAX_UNDER_WAY
    for order in stand_in.orders:
        assert order.entries == (order.mm_hash,)
        assert (order.source, order.target) == ("store-a", "store-b")
        assert order.encode_class is EncodeClass.AHEAD


async def test_what_fails_is_told_and_the_rest_goes_on(bus: AsyncBus) -> None:
    wanted = moves(4)
    async with agent(
        bus, lambda order: failed(order) if order.mm_hash == wanted[1].mm_hash else completed(order)
    ):
        results = await moved(bus, wanted)
    assert results.num_moved == 3
    assert results.failures == {wanted[1].mm_hash: "target_full"}


async def test_what_was_evicted_meanwhile_is_no_failure(bus: AsyncBus) -> None:
    async with agent(bus, lambda order: failed(order, TransferFailureKind.ABSENT)):
        results = await moved(bus, moves(2))
    assert (results.num_gone, results.num_moved, results.failures) == (2, 0, {})


async def test_an_agent_that_says_nothing_does_not_hold_it_up(bus: AsyncBus) -> None:
    wanted = moves(MAX_UNDER_WAY + 1)
    results = await moved(bus, wanted, within_s=0.5)
    assert results.num_moved == 0
    assert results.failures == {each.mm_hash: "the time was over" for each in wanted}


async def test_nothing_to_move_is_no_work(bus: AsyncBus) -> None:
    assert (await moved(bus, [])).num_moved == 0
