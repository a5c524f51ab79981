"""Redis, or something on the way to it, resets a connection that is idle."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from tests.conftest import EmbeddedRedis
from tests.integration.common.samples import LIMIT_S, STREAM, message
from tests.support.faults.tcp_proxy import TcpProxy, proxy_to
from tests.support.waiting import until
from triptych_common.bus import AsyncBus


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_the_next_command_takes_another(
    own_redis: EmbeddedRedis, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def publish(proxy: TcpProxy) -> None:
        async with (
            await AsyncBus.connect(proxy.url, "test", client_name="tests") as bus,
            asyncio.timeout(LIMIT_S),
        ):
            await bus.publish(STREAM, message(1))
            idle = [each._writer.transport for each in bus.client.connection_pool._available_connections]
            proxy.reset_connections()
            await until(lambda: all(transport.is_closing() for transport in idle))
            num_before = proxy.num_connections
            await bus.publish(STREAM, message(2))
            assert idle
            assert proxy.num_connections > num_before
            assert await bus.stream_length(STREAM) == 2

    with proxy_to(own_redis.socket_path) as proxy, asyncio.Runner(loop_factory=loop) as runner:
        runner.run(publish(proxy))
