"""Redis is killed and comes back with its data: nothing is lost, and nothing stays pending."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.conftest import EmbeddedRedis, embedded_redis
from tests.integration.common.samples import (
    LIMIT_S,
    STREAM,
    consuming_bus,
    ids,
    message,
    take,
)


@pytest.fixture
def lasting_redis() -> Iterator[EmbeddedRedis]:
    with embedded_redis(keeps_data=True) as server:
        yield server


async def test_what_was_published_before_is_read_after(lasting_redis: EmbeddedRedis) -> None:
    async with consuming_bus(lasting_redis.url, prefetch=2) as (bus, consumer):
        changed = asyncio.Event()
        bus.on_server_changed(changed.set)
        for number in (1, 2, 3):
            await bus.publish(STREAM, message(number))
        held = await anext(consumer)
        lasting_redis.stop()
        lasting_redis.start()
        await held.ack()
        assert await take(consumer, 2) == ids(2, 3)
        assert await bus.stream_length(STREAM) == 0
        assert (await bus.client.xpending(STREAM, "g"))["pending"] == 0
        assert changed.is_set()


async def test_delivered_but_unread_entries_come_again(lasting_redis: EmbeddedRedis) -> None:
    async with consuming_bus(lasting_redis.url, prefetch=2) as (bus, consumer):
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(take(consumer, 1))
            await bus.publish(STREAM, message(1))
            await waiting
        # As if the answer to a read had been lost with the connection.
        await bus.publish(STREAM, message(2))
        await bus.client.xreadgroup("g", "c", {STREAM: ">"})
        lasting_redis.stop()
        lasting_redis.start()
        assert await take(consumer, 1) == ids(2)
