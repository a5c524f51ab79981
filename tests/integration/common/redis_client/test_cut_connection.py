"""The connection breaks, once or for a while; Redis itself lives on with its data."""

import asyncio
import queue
from collections.abc import Iterator

import pytest

from tests.conftest import EmbeddedRedis
from tests.integration.common.samples import LIMIT_S, STREAM, ids, message, take, take_queued, until_lost
from tests.support.faults.tcp_proxy import TcpProxy, proxy_to
from triptych_common.bus import AsyncBus, ThreadedBus
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.codec import Envelope


@pytest.fixture
def proxy(own_redis: EmbeddedRedis) -> Iterator[TcpProxy]:
    with proxy_to(own_redis.socket_path) as running:
        yield running


async def test_publisher_waits_for_the_connection(proxy: TcpProxy) -> None:
    async with await AsyncBus.connect(proxy.url, "test", client_name="tests") as bus:
        proxy.cut()
        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(bus.publish(STREAM, message(1)))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(publishing), 0.3)
            proxy.restore()
            await publishing
        assert await bus.stream_length(STREAM) == 1


async def test_publisher_gives_up_in_time(proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych_common.redis_client.commands.COMMAND_LIMIT_S", 0.5)
    async with await AsyncBus.connect(proxy.url, "test", client_name="tests") as bus:
        proxy.cut()
        with pytest.raises(BusUnavailableError, match=r"publish: Error .* connecting"):
            await bus.publish(STREAM, message(1))
        proxy.restore()
        await bus.publish(STREAM, message(2))


async def test_consumer_takes_up_where_it_was(proxy: TcpProxy, own_redis: EmbeddedRedis) -> None:
    async with (
        await AsyncBus.connect(own_redis.url, "test", client_name="near") as near,
        await AsyncBus.connect(proxy.url, "test", client_name="far") as far,
        far.consumer(STREAM, group="g", consumer="c", prefetch=4) as consumer,
        asyncio.timeout(LIMIT_S),
    ):
        await near.publish(STREAM, message(1))
        held = await anext(consumer)
        proxy.cut()
        await near.publish(STREAM, message(2))
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(take(consumer, 1))
            await until_lost(consumer)
            proxy.restore()
            assert await taking == ids(2)
        await held.ack()
        assert await near.stream_length(STREAM) == 0
        assert (await near.client.xpending(STREAM, "g"))["pending"] == 0


async def test_every_entry_arrives_while_connections_break_again_and_again(
    proxy: TcpProxy, own_redis: EmbeddedRedis
) -> None:
    count = 60
    async with (
        await AsyncBus.connect(own_redis.url, "test", client_name="near") as near,
        await AsyncBus.connect(proxy.url, "test", client_name="far") as far,
        far.consumer(STREAM, group="g", consumer="c", prefetch=4) as consumer,
        asyncio.timeout(LIMIT_S),
    ):
        seen: set[str] = set()
        for number in range(count):
            await near.publish(STREAM, message(number))
            if number % 5 == 0:
                proxy.drop_connections()
            if number % 3 == 0:
                seen.update(await take(consumer, 1))
        while len(seen) < count:  # an ack may have been lost with its connection: then an entry comes twice
            seen.update(await take(consumer, 1))
        assert seen == set(ids(*range(count)))


def test_threaded_bus_waits_for_the_connection(proxy: TcpProxy) -> None:
    received: queue.Queue[Envelope] = queue.Queue()
    bus = ThreadedBus(proxy.url, "test", client_name="tests")
    try:
        bus.subscribe(STREAM, group="g", consumer="c", callback=received.put)
        bus.publish(STREAM, message(1))
        assert take_queued(received, 1) == ids(1)
        proxy.cut()
        for number in range(2, 6):
            assert bus.publish(STREAM, message(number))
        proxy.restore()
        assert take_queued(received, 4) == ids(2, 3, 4, 5)
        assert bus.num_dropped == 0
    finally:
        bus.close()
