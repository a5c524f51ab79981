"""Callers that wait for answers are called when another Redis answers than before."""

import asyncio

from tests.conftest import EmbeddedRedis
from tests.integration.common.samples import LIMIT_S, STREAM, consuming_bus
from triptych_common.bus import AsyncBus
from triptych_common.protocol.messages import EncodeCompleted


async def test_a_restart_wakes_buses_that_only_read(own_redis: EmbeddedRedis) -> None:
    async with (
        await AsyncBus.connect(own_redis.url, "test", client_name="tests") as bus,
        bus.consumer(STREAM, group="g", consumer="c") as consumer,
        asyncio.timeout(LIMIT_S),
        asyncio.TaskGroup() as tasks,
    ):
        changed = asyncio.Event()
        bus.on_server_changed(changed.set)
        waiting = tasks.create_task(consumer.__anext__())
        own_redis.stop()
        own_redis.start()
        await changed.wait()
        waiting.cancel()


async def test_lost_connections_alone_are_no_change(own_redis: EmbeddedRedis) -> None:
    async with await AsyncBus.connect(own_redis.url, "test", client_name="tests") as bus:
        calls: list[str] = []
        bus.on_server_changed(lambda: calls.append("changed"))
        async with bus.consumer(STREAM, group="g", consumer="c") as consumer, asyncio.timeout(LIMIT_S):
            for _ in range(3):
                await bus.client.client_kill_filter(_type="normal", skipme=False)
                await bus.publish(STREAM, message())
                delivery = await anext(consumer)
                await delivery.ack()
        assert calls == []


async def test_emptied_redis_is_reported_once(own_redis: EmbeddedRedis) -> None:
    async with consuming_bus(own_redis.url) as (bus, consumer):
        calls: list[str] = []
        bus.on_server_changed(lambda: calls.append("changed"))
        await bus.publish(STREAM, message())
        await (await anext(consumer)).ack()
        await bus.client.flushall()
        await bus.publish(STREAM, message())
        await (await anext(consumer)).ack()
        assert calls == ["changed"]


async def test_a_callback_that_fails_stops_no_other(
    own_redis: EmbeddedRedis,
) -> None:
    def fail() -> None:
        raise RuntimeError("broken callback")

    async with await AsyncBus.connect(own_redis.url, "test", client_name="tests") as bus:
        changed = asyncio.Event()
        bus.on_server_changed(fail)
        bus.on_server_changed(changed.set)
        own_redis.stop()
        own_redis.start()
        await bus.stream_length("triptych:test:acks:e")
        assert changed.is_set()


async def test_a_user_without_the_right_still_notices_lost_groups(own_redis: EmbeddedRedis) -> None:
    async with await AsyncBus.connect(own_redis.url, "test", client_name="admin") as admin:
        await admin.client.execute_command(
            "ACL", "SETUSER", "limited", "on", ">secret", "~*", "+@all", "-info"
        )
        url = own_redis.url.replace("unix://", "unix://limited:secret@")
        async with (
            await AsyncBus.connect(url, "test", client_name="tests") as bus,
            bus.consumer(STREAM, group="g", consumer="c") as consumer,
            asyncio.timeout(LIMIT_S),
        ):
            changed = asyncio.Event()
            bus.on_server_changed(changed.set)
            await bus.publish(STREAM, message())
            await (await anext(consumer)).ack()
            await admin.client.flushall()
            await bus.publish(STREAM, message())
            await anext(consumer)
            assert changed.is_set()


def message() -> EncodeCompleted:
    return EncodeCompleted(job_id="job-1", mm_hash="ab" * 32, encoder="e", encode_s=0)
