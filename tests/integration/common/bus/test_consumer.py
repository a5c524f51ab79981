"""Consumers against a real Redis: delivery, flow control, takeover, dead letters, loss of data."""

import asyncio
import itertools
from collections.abc import Collection
from typing import Any

import pytest

from tests.integration.common.samples import until_blocked
from triptych_common.bus import AsyncBus, Delivery, StreamConsumer
from triptych_common.bus.consumer_group import ConsumerGroup
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeCompleted

STREAM = "triptych:test:encode-jobs"
GROUP = "encoders"
LIMIT_S = 60.0


def message(number: int) -> EncodeCompleted:
    return EncodeCompleted(job_id=f"job-{number}", mm_hash="ab" * 32, encoder="e", encode_s=0)


def job_id(delivery: Delivery) -> str:
    assert isinstance(delivery.envelope.message, EncodeCompleted)
    return delivery.envelope.message.job_id


async def take(consumer: StreamConsumer) -> Delivery:
    async with asyncio.timeout(LIMIT_S):
        return await anext(consumer)


def num_pending(raw: Any) -> int:
    return int(raw.xpending(STREAM, GROUP)["pending"])


async def test_one_fault_does_not_end_the_renewal_of_leases(
    bus: AsyncBus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever this consumer works on would be taken over, again and again, and it would not know why."""
    renewals: asyncio.Queue[int] = asyncio.Queue()
    numbers = itertools.count(1)
    renew = ConsumerGroup.renew

    async def fail_once(self: ConsumerGroup, holding: Collection[bytes]) -> None:
        renewals.put_nowait(number := next(numbers))
        if number == 1:
            raise RuntimeError("a fault of the client's")
        await renew(self, holding)

    monkeypatch.setattr(ConsumerGroup, "renew", fail_once)
    await bus.publish(STREAM, message(1))
    async with bus.consumer(STREAM, group=GROUP, consumer="e-0", min_idle_ms=60) as consumer:
        await take(consumer)
        async with asyncio.timeout(LIMIT_S):
            for _ in range(3):
                await renewals.get()
    assert caplog.messages == ["lease of stream entries not renewed"]


async def test_in_order_with_everything_that_travels(bus: AsyncBus, raw: Any) -> None:
    for number in range(3):
        await bus.publish(
            STREAM, message(number), traceparent="00-tp", remaining_ms=5000, blob=bytes([number, 255])
        )
    async with bus.consumer(STREAM, group=GROUP, consumer="e-0") as consumer:
        for number in range(3):
            delivery = await take(consumer)
            envelope = delivery.envelope
            assert (envelope.message, envelope.blob) == (message(number), bytes([number, 255]))
            assert (envelope.traceparent, envelope.remaining_ms) == ("00-tp", 5000)
            assert (delivery.num_deliveries, delivery.entry_id.count("-")) == (1, 1)
            await delivery.ack()
            await delivery.ack()
        assert consumer.is_connected
    assert (raw.xlen(STREAM), num_pending(raw)) == (0, 0)


async def test_publication_time_survives_the_queue(bus: AsyncBus, raw: Any) -> None:
    await bus.publish(STREAM, message(1), remaining_ms=500_000)
    ((entry_id, fields),) = raw.xrange(STREAM)
    published_ms = int(entry_id.partition(b"-")[0])
    raw.delete(STREAM)
    raw.xadd(STREAM, fields, id=f"{published_ms - 200_000}-0")
    async with bus.consumer(STREAM, group=GROUP, consumer="e-0") as consumer:
        envelope = (await take(consumer)).envelope
    assert 199 < envelope.queued_s < 300
    assert envelope.deadline is not None
    assert 200 < envelope.deadline - envelope.received_at <= 301


async def test_a_clock_that_was_set_back_does_not_age_entries(bus: AsyncBus) -> None:
    async with bus.consumer(STREAM, group=GROUP, consumer="e-0") as consumer:
        await bus.publish(STREAM, message(1))
        await (await take(consumer)).ack()
        consumer._group._redis_clock_offset_s += 3600  # what we learned before Redis' clock was set back
        await bus.publish(STREAM, message(2))
        assert (await take(consumer)).envelope.queued_s < 5


async def test_takes_no_more_than_it_can_hold(bus: AsyncBus, raw: Any) -> None:
    for number in range(5):
        await bus.publish(STREAM, message(number))
    async with bus.consumer(STREAM, group=GROUP, consumer="e-0", prefetch=2) as consumer:
        first, _second = await take(consumer), await take(consumer)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await anext(consumer)
        assert (num_pending(raw), consumer.num_outstanding) == (2, 2)
        await first.ack()
        assert job_id(await take(consumer)) == "job-2"
        assert num_pending(raw) == 2


async def test_waiting_consumer_is_woken_by_a_publication(bus: AsyncBus, redis_url: str) -> None:
    async with bus.consumer(STREAM, group=GROUP, consumer="e-0") as consumer, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(take(consumer))
        await until_blocked(redis_url)
        await bus.publish(STREAM, message(1))
        assert job_id(await waiting) == "job-1"


async def test_two_consumers_share_the_work(bus: AsyncBus) -> None:
    for number in range(10):
        await bus.publish(STREAM, message(number))
    seen: list[str] = []
    consumers: list[StreamConsumer] = []

    async def work(name: str) -> None:
        async with bus.consumer(STREAM, group=GROUP, consumer=name) as consumer:
            consumers.append(consumer)
            async for delivery in consumer:
                seen.append(job_id(delivery))
                await delivery.ack()
                if len(seen) == 10:
                    for each in consumers:
                        each.stop()
                await asyncio.sleep(0)

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        for name in ("e-0", "e-1"):
            tasks.create_task(work(name))
    assert sorted(seen) == sorted(f"job-{n}" for n in range(10))


async def test_restarted_consumer_first_gets_what_it_had(bus: AsyncBus) -> None:
    for number in range(3):
        await bus.publish(STREAM, message(number))
    async with bus.consumer(STREAM, group=GROUP, consumer="e-0", prefetch=2) as before:
        assert [job_id(await take(before)) for _ in range(2)] == ["job-0", "job-1"]
    async with bus.consumer(STREAM, group=GROUP, consumer="e-0", prefetch=3) as after:
        deliveries = [await take(after) for _ in range(3)]
        assert [job_id(each) for each in deliveries] == ["job-0", "job-1", "job-2"]
        assert [each.num_deliveries for each in deliveries] == [2, 2, 1]


async def test_dead_consumers_jobs_are_taken_over(bus: AsyncBus, raw: Any) -> None:
    await bus.publish(STREAM, message(1))
    dead = bus.consumer(STREAM, group=GROUP, consumer="e-dead", min_idle_ms=300)
    async with dead:
        await take(dead)
    async with bus.consumer(STREAM, group=GROUP, consumer="e-1", min_idle_ms=300) as consumer:
        started = asyncio.get_running_loop().time()
        delivery = await take(consumer)
        assert asyncio.get_running_loop().time() - started < 60
        assert (job_id(delivery), delivery.num_deliveries) == ("job-1", 2)
        await delivery.ack()
    assert num_pending(raw) == 0


async def test_slow_but_living_consumer_keeps_its_job(bus: AsyncBus) -> None:
    await bus.publish(STREAM, message(1))
    async with (
        bus.consumer(STREAM, group=GROUP, consumer="e-slow", min_idle_ms=300) as slow,
        bus.consumer(STREAM, group=GROUP, consumer="e-idle", min_idle_ms=300) as idle,
    ):
        delivery = await take(slow)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await anext(idle)
        await delivery.ack()


async def test_handed_back_job_goes_to_another_at_once(bus: AsyncBus) -> None:
    await bus.publish(STREAM, message(1))
    async with bus.consumer(STREAM, group=GROUP, consumer="e-0", min_idle_ms=60_000) as leaving:
        delivery = await take(leaving)
        leaving.stop()
        await delivery.hand_back()
        await delivery.ack()  # late: no longer ours
        with pytest.raises(StopAsyncIteration):
            await anext(leaving)
    async with bus.consumer(STREAM, group=GROUP, consumer="e-1", min_idle_ms=60_000) as other:
        assert job_id(await take(other)) == "job-1"


async def test_handing_back_is_no_failed_delivery(bus: AsyncBus, raw: Any) -> None:
    """However often its consumers are restarted, a job is not given up for that."""
    await bus.publish(STREAM, message(1))
    for restart in range(4):
        name = f"e-{restart}"
        async with bus.consumer(
            STREAM, group=GROUP, consumer=name, min_idle_ms=60_000, max_deliveries=2
        ) as consumer:
            delivery = await take(consumer)
            assert delivery.num_deliveries == 1
            await delivery.hand_back()
    assert raw.xlen(bus.names.dead_letters) == 0


async def test_prefetched_but_unseen_entries_are_handed_back(bus: AsyncBus) -> None:
    for number in range(3):
        await bus.publish(STREAM, message(number))
    async with bus.consumer(STREAM, group=GROUP, consumer="e-0", min_idle_ms=60_000, prefetch=3) as leaving:
        await (await take(leaving)).ack()
    async with bus.consumer(STREAM, group=GROUP, consumer="e-1", min_idle_ms=60_000, prefetch=3) as other:
        assert [job_id(await take(other)) for _ in range(2)] == ["job-1", "job-2"]


async def test_stop_ends_iteration(bus: AsyncBus) -> None:
    async with bus.consumer(STREAM, group=GROUP, consumer="e-0") as consumer:
        consumer.stop()
        assert [delivery async for delivery in consumer] == []


class TestDeadLetters:
    @pytest.mark.parametrize(
        ("entry", "reason"),
        [
            (
                {"v": "2", "type": "EncodeCompleted", "body": "{}"},
                "MalformedMessageError: EncodeCompleted: job_id",
            ),
            (
                {"v": "99", "type": "EncodeCompleted", "body": "{}"},
                "UnsupportedVersionError: message has schema version 99",
            ),
            ({"foreign": "entry"}, "MalformedMessageError: field v is missing"),
        ],
    )
    async def test_what_cannot_be_read_is_kept_with_the_reason(
        self, bus: AsyncBus, raw: Any, entry: dict[str, str], reason: str
    ) -> None:
        raw.xadd(STREAM, {**entry, "blob": b"x" * 100_000})
        await bus.publish(STREAM, message(1))
        async with bus.consumer(STREAM, group=GROUP, consumer="e-0") as consumer:
            delivery = await take(consumer)
            assert job_id(delivery) == "job-1"
            await delivery.ack()
        assert (raw.xlen(STREAM), num_pending(raw)) == (0, 0)
        ((_, letter),) = raw.xrange(bus.names.dead_letters)
        assert letter[b"source_stream"].decode() == STREAM
        assert letter[b"reason"].decode().startswith(reason)
        assert {name: letter[name.encode()].decode() for name in entry} == entry
        assert b"blob" not in letter  # users' media do not stay
        assert letter[b"blob_num_bytes"] == b"100000"

    async def test_given_up_after_too_many_deliveries(self, bus: AsyncBus, raw: Any) -> None:
        failures: list[tuple[Envelope, str]] = []

        async def note_failure(envelope: Envelope, reason: str) -> None:
            failures.append((envelope, reason))

        await bus.publish(STREAM, message(1))
        for _ in range(2):
            async with bus.consumer(STREAM, group=GROUP, consumer="e-0", max_deliveries=2) as consumer:
                await take(consumer)
        await bus.publish(STREAM, message(2))
        async with bus.consumer(
            STREAM, group=GROUP, consumer="e-0", max_deliveries=2, on_dead_letter=note_failure
        ) as consumer:
            assert job_id(await take(consumer)) == "job-2"
        ((envelope, reason),) = failures
        assert (envelope.message, reason) == (message(1), "delivered 2 times, limit 2")
        ((_, letter),) = raw.xrange(bus.names.dead_letters)
        assert letter[b"reason"] == b"delivered 2 times, limit 2"

    async def test_rejected_by_the_handler(self, bus: AsyncBus, raw: Any) -> None:
        await bus.publish(STREAM, message(1))
        async with bus.consumer(STREAM, group=GROUP, consumer="e-0") as consumer:
            delivery = await take(consumer)
            await delivery.reject("no such model")
            await delivery.ack()
        ((_, letter),) = raw.xrange(bus.names.dead_letters)
        assert letter[b"reason"] == b"no such model"
        assert num_pending(raw) == 0


class TestLossOfData:
    async def test_group_is_made_again_from_the_start(self, bus: AsyncBus, raw: Any, redis_url: str) -> None:
        async with (
            bus.consumer(STREAM, group=GROUP, consumer="e-0") as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            waiting = tasks.create_task(take(consumer))
            await until_blocked(redis_url)
            raw.flushall()
            await bus.publish(STREAM, message(1))  # before the group exists again
            delivery = await waiting
            assert job_id(delivery) == "job-1"
            await delivery.ack()

    async def test_ack_of_what_redis_forgot_is_harmless(self, bus: AsyncBus, raw: Any) -> None:
        await bus.publish(STREAM, message(1))
        async with bus.consumer(STREAM, group=GROUP, consumer="e-0") as consumer:
            delivery = await take(consumer)
            raw.flushall()
            await delivery.ack()
            await bus.publish(STREAM, message(2))
            assert job_id(await take(consumer)) == "job-2"

    async def test_pending_entry_without_content_is_dropped(self, bus: AsyncBus, raw: Any) -> None:
        entry_id = await bus.publish(STREAM, message(1))
        async with bus.consumer(STREAM, group=GROUP, consumer="e-0") as consumer:
            await take(consumer)
        raw.xdel(STREAM, entry_id)
        await bus.publish(STREAM, message(2))
        async with bus.consumer(STREAM, group=GROUP, consumer="e-0") as consumer:
            assert job_id(await take(consumer)) == "job-2"
        assert num_pending(raw) == 1

    async def test_killed_connections_are_not_noticed_by_the_caller(
        self, bus: AsyncBus, raw: Any, redis_url: str
    ) -> None:
        async with bus.consumer(STREAM, group=GROUP, consumer="e-0", prefetch=8) as consumer:
            await bus.publish(STREAM, message(0))
            held = await take(consumer)
            for number in range(1, 4):
                async with asyncio.TaskGroup() as tasks:
                    waiting = tasks.create_task(take(consumer))
                    await until_blocked(redis_url)
                    raw.client_kill_filter(_type="normal", skipme=True)
                    await bus.publish(STREAM, message(number))
                delivery = waiting.result()
                assert job_id(delivery) == f"job-{number}", "what is held does not come again"
                await delivery.ack()
            await held.ack()
        assert num_pending(raw) == 0


async def test_cancelled_reader_loses_nothing(bus: AsyncBus) -> None:
    async with bus.consumer(STREAM, group=GROUP, consumer="e-0") as consumer:
        for number in range(20):
            reading = asyncio.get_running_loop().create_task(consumer.__anext__())
            for _ in range(4 * number):
                await asyncio.sleep(0)
            await bus.publish(STREAM, message(number))
            reading.cancel()
            try:
                delivery: Delivery = await reading
            except asyncio.CancelledError:
                delivery = await take(consumer)
            assert job_id(delivery) == f"job-{number}"
            await delivery.ack()


class TestUnavailable:
    @pytest.mark.parametrize("url", ["unix:///nonexistent/redis.sock", "redis://127.0.0.1:1/0"])
    async def test_connect_raises_it(self, url: str) -> None:
        with pytest.raises(BusUnavailableError, match="connect: "):
            await AsyncBus.connect(url, "test", client_name="tests")

    async def test_wrong_password_raises_it(self, redis_url: str, raw: Any) -> None:
        raw.config_set("requirepass", "right")
        try:
            with pytest.raises(BusUnavailableError, match="asks for a password"):
                await AsyncBus.connect(redis_url, "test", client_name="tests")
        finally:
            raw.auth("right")
            raw.config_set("requirepass", "")

    async def test_out_of_memory_raises_it(self, bus: AsyncBus, raw: Any) -> None:
        raw.config_set("maxmemory", "1")
        try:
            with pytest.raises(BusUnavailableError, match="maxmemory"):
                await bus.publish(STREAM, message(1))
        finally:
            raw.config_set("maxmemory", "0")
        await bus.publish(STREAM, message(1))
