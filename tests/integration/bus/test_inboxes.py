"""Streams of instances that never come back: they end, whoever still writes to them."""

import asyncio
from typing import Any

import pytest
import redis

from triptych_common.bus import AsyncBus, Registry, ThreadedBus, drop_idle_consumers
from triptych_common.protocol.messages import EncodeCompleted, InstanceRecord, Role
from triptych_common.protocol.names import ENCODERS_GROUP, INBOX_TTL_S, OWNER_GROUP, inboxes

RECORD = InstanceRecord(instance="pd-0", boot_id="b-1", role=Role.PREFILL_DECODE, num_slots=4)
DIGEST = "d" * 64
MESSAGE = EncodeCompleted(job_id="job-1", mm_hash="ab" * 32, encoder="e", encode_s=0)


@pytest.fixture
def raw(redis_url: str) -> Any:
    with redis.Redis.from_url(redis_url) as client:
        yield client


async def test_a_message_to_an_inbox_lets_it_expire(bus: AsyncBus, raw: Any) -> None:
    for inbox in inboxes(bus.names, "gone"):
        await bus.publish(inbox, MESSAGE)
        assert 0 < raw.ttl(inbox) <= INBOX_TTL_S


def test_so_does_a_message_of_an_engine(redis_url: str, raw: Any) -> None:
    sender = ThreadedBus(redis_url, "test", client_name="sender")
    inbox = "triptych:test:acks:gone"
    sender.publish(inbox, MESSAGE)
    sender.close()
    assert raw.xlen(inbox) == 1
    assert 0 < raw.ttl(inbox) <= INBOX_TTL_S


async def test_heartbeats_keep_the_inboxes(bus: AsyncBus, raw: Any) -> None:
    inbox = bus.names.metadata("pd-0")
    async with Registry(bus).keep_registered(RECORD) as registration:
        raw.xgroup_create(inbox, OWNER_GROUP, id="0", mkstream=True)
        raw.expire(inbox, 1)
        await registration.beat()
        assert raw.ttl(inbox) > 1


async def test_cleared_when_its_owner_has_left(bus: AsyncBus, raw: Any) -> None:
    registry = Registry(bus)
    async with registry.keep_registered(RECORD):
        for inbox in inboxes(bus.names, "pd-0"):
            await bus.publish(inbox, MESSAGE)
        await bus.publish(bus.names.metadata("pd-1"), MESSAGE)
        await registry.clear_inboxes("pd-0")
        assert raw.exists(*inboxes(bus.names, "pd-0")) == 4  # it is registered: somebody reads them
    await registry.clear_inboxes("pd-0")
    assert raw.exists(*inboxes(bus.names, "pd-0")) == 0
    assert raw.exists(bus.names.metadata("pd-1"))


async def test_consumers_that_hold_nothing_are_dropped(bus: AsyncBus, raw: Any) -> None:
    stream = bus.names.encode_jobs(DIGEST)
    assert await drop_idle_consumers(bus, stream, ENCODERS_GROUP, idle_ms=0) == 0  # no stream yet
    for name in ("e-gone", "e-holds"):
        await bus.publish(stream, MESSAGE)
        async with bus.consumer(stream, group=ENCODERS_GROUP, consumer=name) as consumer:
            delivery = await anext(consumer)
            if name == "e-gone":
                await delivery.ack()
    await asyncio.sleep(0.01)  # their idle time has a resolution
    assert await drop_idle_consumers(bus, stream, ENCODERS_GROUP) == 0  # not idle for long
    assert await drop_idle_consumers(bus, stream, ENCODERS_GROUP, idle_ms=1) == 1
    (left,) = raw.xinfo_consumers(stream, ENCODERS_GROUP)
    assert (left["name"], left["pending"]) == (b"e-holds", 1)
    assert await drop_idle_consumers(bus, stream, "no-group", idle_ms=0) == 0
