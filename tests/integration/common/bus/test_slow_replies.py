"""Replies come late, or the connection breaks: both are waited for, nothing is sent twice or left pending."""

import asyncio
import queue
from collections.abc import Iterator

import pytest

from tests.conftest import EmbeddedRedis
from tests.integration.common.samples import LIMIT_S, STREAM, ids, message, take, take_queued, until_lost
from tests.support.faults.tcp_proxy import TcpProxy, proxy_to
from triptych_common.bus import AsyncBus, ThreadedBus
from triptych_common.bus import consumer_group as bus_group
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.codec import Envelope
from triptych_common.redis_client import commands as bus_connection


@pytest.fixture
def proxy(own_redis: EmbeddedRedis) -> Iterator[TcpProxy]:
    with proxy_to(own_redis.socket_path) as running:
        yield running


def test_a_read_blocks_for_less_than_it_may_take() -> None:
    assert bus_connection.BLOCK_MS / 1000 < bus_connection.READ_LIMIT_S
    assert bus_connection.READ_LIMIT_S - bus_connection.BLOCK_MS / 1000 >= bus_connection.COMMAND_LIMIT_S


async def test_nothing_is_sent_twice(proxy: TcpProxy, own_redis: EmbeddedRedis) -> None:
    async with await AsyncBus.connect(proxy.url, "test", client_name="tests") as bus:
        proxy.reply_delay_s = 1.0
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(bus.publish(STREAM, message(number)) for number in range(5)))
        proxy.reply_delay_s = 0.0
        assert await bus.stream_length(STREAM) == 5


async def test_every_entry_comes_once(proxy: TcpProxy, own_redis: EmbeddedRedis) -> None:
    async with (
        await AsyncBus.connect(own_redis.url, "test", client_name="near") as near,
        await AsyncBus.connect(proxy.url, "test", client_name="far") as far,
        far.consumer(STREAM, group="g", consumer="c", prefetch=8) as consumer,
    ):
        proxy.reply_delay_s = 0.3
        for number in range(4):
            await near.publish(STREAM, message(number))
        assert await take(consumer, 4) == ids(0, 1, 2, 3)
        assert await near.stream_length(STREAM) == 0
        assert (await near.client.xpending(STREAM, "g"))["pending"] == 0


async def test_slower_than_the_limit_is_an_error_in_time_and_recovers(
    proxy: TcpProxy, own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        await AsyncBus.connect(own_redis.url, "test", client_name="near") as near,
        await AsyncBus.connect(proxy.url, "test", client_name="far") as far,
        far.consumer(STREAM, group="g", consumer="c") as consumer,
        asyncio.timeout(LIMIT_S),
    ):
        await near.publish(STREAM, message(1))
        assert await take(consumer, 1) == ids(1)
        monkeypatch.setattr(bus_connection, "COMMAND_LIMIT_S", 0.5)
        monkeypatch.setattr(bus_group, "COMMAND_LIMIT_S", 0.5)
        monkeypatch.setattr(bus_group, "READ_LIMIT_S", 1.5)
        proxy.reply_delay_s = 3.0
        with pytest.raises(BusUnavailableError, match=r"no answer from Redis in 0\.5 s"):
            await far.publish(STREAM, message(2))
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(take(consumer, 1))
            await until_lost(consumer)
            assert not taking.done()
            proxy.reply_delay_s = 0.0
            await taking
        assert (await near.client.xpending(STREAM, "g"))["pending"] == 0


def test_threaded_bus_sends_nothing_twice(proxy: TcpProxy, own_redis: EmbeddedRedis) -> None:
    received: queue.Queue[Envelope] = queue.Queue()
    bus = ThreadedBus(proxy.url, "test", client_name="tests")
    try:
        proxy.reply_delay_s = 0.5
        bus.subscribe(STREAM, group="g", consumer="c", callback=received.put)
        for number in range(5):
            bus.publish(STREAM, message(number))
        assert take_queued(received, 5) == ids(0, 1, 2, 3, 4)
        assert received.empty()
    finally:
        proxy.reply_delay_s = 0.0
        bus.close()
    assert received.empty()


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
