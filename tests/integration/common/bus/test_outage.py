"""A Redis that stops, hangs and comes back: under a consumer, a publisher, a heartbeat, a threaded bus."""

import asyncio
import queue
import time
from contextlib import closing

import pytest

from tests.conftest import EmbeddedRedis
from tests.integration.common.samples import (
    LIMIT_S,
    STREAM,
    consuming_bus,
    message,
    until_blocked,
)
from tests.support.waiting import until_async
from triptych_common.bus import AsyncBus, ThreadedBus
from triptych_common.bus import consumer_group as bus_group
from triptych_common.coordination import Registry
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_common.redis_client import commands as bus_connection


async def test_consumer_survives_a_restart_without_data(own_redis: EmbeddedRedis) -> None:
    async with consuming_bus(own_redis.url, prefetch=4) as (bus, consumer):
        await bus.publish(STREAM, message(1))
        held = await anext(consumer)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(consumer.__anext__())
            await until_blocked(own_redis.url)
            own_redis.stop()
            with pytest.raises(BusUnavailableError):
                await bus.publish(STREAM, message(2))
            await held.ack()  # cannot be sent now
            assert not consumer.is_connected
            own_redis.start()
            await bus.publish(STREAM, message(3))
            delivery = await waiting
        assert delivery.envelope.message == message(3)
        await delivery.ack()
        assert consumer.is_connected


async def test_ack_during_an_outage_is_sent_afterwards(
    own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with consuming_bus(own_redis.url) as (bus, consumer):
        await bus.publish(STREAM, message(1))
        held = await anext(consumer)
        own_redis.freeze()
        monkeypatch.setattr(bus_group, "COMMAND_LIMIT_S", 0.3)
        await held.ack()
        own_redis.thaw()
        await bus.publish(STREAM, message(2))
        assert (await anext(consumer)).envelope.message == message(2)
        assert await bus.client.xlen(STREAM) == 1


async def test_frozen_redis_is_given_up_in_time(
    own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_connection, "COMMAND_LIMIT_S", 0.3)
    async with await AsyncBus.connect(own_redis.url, "test", client_name="tests") as bus:
        own_redis.freeze()
        started = time.monotonic()
        with pytest.raises(BusUnavailableError, match="publish"):
            await bus.publish(STREAM, message(1))
        assert time.monotonic() - started < 60
        own_redis.thaw()
        await bus.publish(STREAM, message(2))


async def test_heartbeats_bring_an_instance_back(own_redis: EmbeddedRedis) -> None:
    record = InstanceRecord(instance="pd-0", boot_id="b-1", role=Role.PREFILL_DECODE)
    async with (
        await AsyncBus.connect(own_redis.url, "test", client_name="tests") as bus,
        asyncio.timeout(LIMIT_S),
    ):
        registry = Registry(bus)
        async with registry.keep_registered(record, interval_s=0.05, ttl_s=5.0):
            own_redis.stop()
            own_redis.start()
            await until_async(registry.list_instances)
            assert await registry.list_instances() == [record]


def test_threaded_bus_starts_without_redis(own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_connection, "COMMAND_LIMIT_S", 600.0)  # none is waited for
    own_redis.stop()
    received: queue.Queue[Envelope] = queue.Queue()
    started = time.monotonic()
    with closing(ThreadedBus(own_redis.url, "test", client_name="tests")) as bus:
        bus.subscribe(STREAM, group="g", consumer="c", callback=received.put)
        bus.publish(STREAM, message(1))
        assert time.monotonic() - started < 30
        own_redis.start()
        assert received.get(timeout=LIMIT_S).message == message(1)


def test_threaded_bus_closes_in_time_without_redis(
    own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for its thread for a limited time."""
    monkeypatch.setattr(bus_connection, "COMMAND_LIMIT_S", 600.0)
    own_redis.stop()
    bus = ThreadedBus(own_redis.url, "test", client_name="tests")
    bus.publish(STREAM, message(1))
    bus.close(flush_s=0.2)
    assert not bus._thread.is_alive()
    assert bus.num_dropped == 1
