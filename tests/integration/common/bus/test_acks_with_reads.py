"""Acks that go out with the next read: no round trip of their own, and none is lost."""

from collections.abc import Iterable
from typing import Any

import pytest
import redis

from tests.integration.common.bus.test_consumer import GROUP, STREAM, job_id, message, num_pending, take
from triptych_common.bus import AsyncBus, StreamConsumer
from triptych_common.bus.consumer_group import ConsumerGroup


async def take_and_ack_soon(bus: AsyncBus, consumer: StreamConsumer) -> None:
    """Three entries, before the next read."""
    for number in range(3):
        await bus.publish(STREAM, message(number))
    for _ in range(3):
        (await take(consumer)).ack_soon()


async def test_they_need_no_round_trip(bus: AsyncBus, raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: ConsumerGroup, entry_ids: Iterable[bytes]) -> None:
        pytest.fail("a round trip for acks alone")

    async with bus.consumer(STREAM, group=GROUP, consumer="e-0", prefetch=8) as consumer:
        with monkeypatch.context() as patched:
            patched.setattr(ConsumerGroup, "ack", refuse)
            await take_and_ack_soon(bus, consumer)
            await bus.publish(STREAM, message(3))
            assert job_id(await take(consumer)) == "job-3"
        assert (raw.xlen(STREAM), num_pending(raw)) == (1, 1)


async def test_after_a_read_that_failed_they_are_sent_again(
    bus: AsyncBus, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_new, failures = ConsumerGroup.read_new, [redis.ConnectionError("cut off")]

    async def fail_once(self: ConsumerGroup, *arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return await read_new(self, *arguments)

    async with bus.consumer(STREAM, group=GROUP, consumer="e-0", prefetch=8) as consumer:
        await take_and_ack_soon(bus, consumer)
        monkeypatch.setattr(ConsumerGroup, "read_new", fail_once)
        await bus.publish(STREAM, message(3))
        assert job_id(await take(consumer)) == "job-3", "what is done does not come again"
        assert (raw.xlen(STREAM), num_pending(raw), failures) == (1, 1, [])


async def test_a_group_that_is_gone_is_made_at_once(
    bus: AsyncBus, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: StreamConsumer) -> None:
        pytest.fail("NOGROUP was taken for another error")

    async with bus.consumer(STREAM, group=GROUP, consumer="e-0", prefetch=8) as consumer:
        await take_and_ack_soon(bus, consumer)
        raw.flushall()
        monkeypatch.setattr(StreamConsumer, "_back_off", refuse)
        await bus.publish(STREAM, message(3))
        assert job_id(await take(consumer)) == "job-3"


async def test_the_last_ones_are_sent_at_the_end(bus: AsyncBus, raw: Any) -> None:
    async with bus.consumer(STREAM, group=GROUP, consumer="e-0", prefetch=8) as consumer:
        await take_and_ack_soon(bus, consumer)
    assert (raw.xlen(STREAM), num_pending(raw)) == (0, 0)
