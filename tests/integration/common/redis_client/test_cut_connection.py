"""The connection breaks, once or for a while; Redis itself lives on with its data."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.conftest import EmbeddedRedis
from tests.integration.common.samples import (
    LIMIT_S,
    STREAM,
    ids,
    message,
    take,
    until_lost,
)
from tests.support.faults.tcp_proxy import TcpProxy, proxy_to
from triptych_common.bus import AsyncBus
from triptych_common.domain.errors import BusUnavailableError


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
