"""Faults in random order, again and again, under load: whatever was taken arrives, and nothing is left.

The seed is in the test's name: a failure can be run again, as far as timing allows.
"""

import asyncio
import queue
import random
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest
import redis

from tests.conftest import EmbeddedRedis, embedded_redis
from tests.integration.common.samples import STREAM, ids, message
from tests.support.faults.tcp_proxy import TcpProxy, proxy_to
from triptych_common.bus import AsyncBus, ThreadedBus
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeCompleted
from triptych_common.protocol.names import OWNER_GROUP

NUM_MESSAGES = 300
NUM_FAULTS = 8
LIMIT_S = 90.0


@pytest.fixture
def lasting_redis() -> Iterator[EmbeddedRedis]:
    with embedded_redis(keeps_data=True) as server:
        yield server


class Faults:
    """Each does its harm for a moment, and cures it."""

    def __init__(self, server: EmbeddedRedis, proxy: TcpProxy, seed: int) -> None:
        self._server = server
        self._proxy = proxy
        self._random = random.Random(seed)
        self._faults: list[Callable[[], None]] = [
            self.drop_connections, self.cut, self.freeze, self.restart, self.fill, self.slow_down,
        ]  # fmt: skip

    async def run(self) -> None:
        for _ in range(NUM_FAULTS):
            await asyncio.sleep(self._random.uniform(0.05, 0.3))
            await asyncio.to_thread(self._random.choice(self._faults))

    def _moment(self) -> None:
        threading.Event().wait(self._random.uniform(0.05, 0.5))

    def drop_connections(self) -> None:
        self._proxy.drop_connections()

    def cut(self) -> None:
        self._proxy.cut()
        self._moment()
        self._proxy.restore()

    def freeze(self) -> None:
        self._server.freeze()
        self._moment()
        self._server.thaw()

    def restart(self) -> None:
        self._server.stop()
        self._moment()
        self._server.start()

    def fill(self) -> None:
        with redis.Redis.from_url(self._server.url) as client:
            client.config_set("maxmemory", "1")
            self._moment()
            client.config_set("maxmemory", "0")

    def slow_down(self) -> None:
        self._proxy.reply_delay_s = 0.1
        self._moment()
        self._proxy.reply_delay_s = 0.0


async def until_accepted(publish: Callable[[], Awaitable[object]]) -> None:
    while True:
        try:
            await publish()
            return
        except BusUnavailableError:
            await asyncio.sleep(0.02)


def check_empty(server: EmbeddedRedis, group: str) -> None:
    with redis.Redis.from_url(server.url) as client:
        assert client.xlen(STREAM) == 0
        assert client.xpending(STREAM, group)["pending"] == 0
        assert client.xlen("triptych:test:dead-letters") == 0


@pytest.mark.parametrize(("seed", "group"), [(0, "g"), (1, OWNER_GROUP), (2, "g"), (3, OWNER_GROUP)])
async def test_asyncio_bus(lasting_redis: EmbeddedRedis, seed: int, group: str) -> None:
    with proxy_to(lasting_redis.socket_path) as proxy:
        seen: set[str] = set()
        wanted = set(ids(*range(NUM_MESSAGES)))
        async with (
            asyncio.timeout(LIMIT_S),
            await AsyncBus.connect(proxy.url, "test", client_name="tests") as bus,
            bus.consumer(STREAM, group=group, consumer="c", prefetch=8) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            faults = tasks.create_task(Faults(lasting_redis, proxy, seed).run())

            async def publish_all() -> None:
                for number in range(NUM_MESSAGES):
                    await until_accepted(lambda number=number: bus.publish(STREAM, message(number)))
                    await asyncio.sleep(0.005)

            tasks.create_task(publish_all())
            while seen != wanted or not faults.done():
                if seen == wanted:
                    await faults
                    break
                delivery = await anext(consumer)
                assert isinstance(delivery.envelope.message, EncodeCompleted)
                seen.add(delivery.envelope.message.job_id)
                await delivery.ack()
            # Entries that were published twice, and acks that were lost, are what is left now.
            consumer.stop()
            async for delivery in consumer:
                await delivery.ack()
        async with (
            asyncio.timeout(LIMIT_S),
            await AsyncBus.connect(lasting_redis.url, "test", client_name="after") as bus,
            bus.consumer(STREAM, group=group, consumer="c", prefetch=8) as consumer,
        ):
            while await bus.stream_length(STREAM):
                await (await anext(consumer)).ack()
        check_empty(lasting_redis, group)


@pytest.mark.parametrize(("seed", "group"), [(10, "g"), (11, OWNER_GROUP), (12, OWNER_GROUP)])
async def test_threaded_bus(lasting_redis: EmbeddedRedis, seed: int, group: str) -> None:
    received: queue.Queue[Envelope] = queue.Queue()
    with proxy_to(lasting_redis.socket_path) as proxy:
        bus = await asyncio.to_thread(ThreadedBus, proxy.url, "test", client_name="tests")
        try:
            bus.subscribe(STREAM, group=group, consumer="c", callback=received.put)
            async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(Faults(lasting_redis, proxy, seed).run())
                for number in range(NUM_MESSAGES):
                    assert bus.publish(STREAM, message(number))
                    await asyncio.sleep(0.005)
            seen: set[str] = set()
            while seen != set(ids(*range(NUM_MESSAGES))):
                envelope = await asyncio.to_thread(received.get, timeout=LIMIT_S)
                assert isinstance(envelope.message, EncodeCompleted)
                seen.add(envelope.message.job_id)
            assert bus.num_dropped == 0
        finally:
            await asyncio.to_thread(bus.close)
