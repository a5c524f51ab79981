"""An encoder's own stream first; when idle, what others cannot take. Real Redis, no store."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from tests.support.encoder.service_bench import DIGEST, LIMIT_S, job, working
from tests.support.stores import StoreProcess
from tests.support.waiting import until, until_async
from triptych_common.bus import AsyncBus, Delivery, StreamConsumer
from triptych_common.bus.inspection import peek
from triptych_common.coordination import ClaimResult, JobOffer, Registry, SingleFlight
from triptych_common.protocol import codec
from triptych_common.protocol.messages import EncodeJob, InstanceRecord, Role
from triptych_common.protocol.names import ENCODERS_GROUP
from triptych_common.redis_client.commands import BLOCK_MS
from triptych_encoder.jobs import job_intake
from triptych_encoder.jobs.job_intake import LOOK_INTERVAL_MS, EncoderPeers, JobIntake


def record(name: str, store: str, num_slots: int = 1, **changes: Any) -> InstanceRecord:
    fields: dict[str, Any] = {"namespace_digest": DIGEST, "num_slots": num_slots} | changes
    return InstanceRecord(instance=name, boot_id="b", role=Role.ENCODE, store=store, **fields)


class Hosts:
    """Encoders at several stores."""

    def __init__(self, bus: AsyncBus, stack: AsyncExitStack) -> None:
        self.bus, self._stack = bus, stack

    async def register(self, each: InstanceRecord) -> None:
        await self._stack.enter_async_context(Registry(self.bus).keep_registered(each))

    async def intake(self, name: str, store: str, num_slots: int = 2) -> JobIntake:
        """Of an encoder that is registered."""
        await self.register(record(name, store, num_slots))
        intake = JobIntake(
            self.bus,
            EncoderPeers(DIGEST, store, Registry(self.bus)),
            name,
            num_slots=num_slots,
            min_idle_ms=600_000,
            max_deliveries=3,
            on_dead_letter=_never,
        )
        return await self._stack.enter_async_context(intake)

    async def open_stream(self, store: str) -> None:
        """As an encoder of that store did."""
        stream = self.bus.names.encode_jobs(DIGEST, store)
        await self.bus.client.xgroup_create(stream, ENCODERS_GROUP, id="0", mkstream=True)

    async def publish(self, store: str, mark: str, spare_after_ms: int | None = 0) -> None:
        fields: Any = codec.encode(
            job(mark * 64), remaining_ms=60_000, blob=b"media", spare_after_ms=spare_after_ms
        )
        await self.bus.client.xadd(self.bus.names.encode_jobs(DIGEST, store), fields)


async def _never(*about: object) -> None:
    raise AssertionError(about)


async def taken(intake: JobIntake) -> Delivery:
    async with asyncio.timeout(LIMIT_S):
        return await anext(intake)


def mark_of(delivery: Delivery) -> str:
    message = delivery.envelope.message
    assert isinstance(message, EncodeJob)
    return message.mm_hash[0]


@asynccontextmanager
async def opened(redis_url: str) -> AsyncIterator[Hosts]:
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(
            await AsyncBus.connect(redis_url, "default", client_name="test")
        )
        yield Hosts(bus, stack)


@pytest.fixture(autouse=True)
def peers_are_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_intake, "REFRESH_INTERVAL_S", -1.0)


async def test_own_jobs_go_first_and_a_spare_one_follows_when_idle(redis_url: str) -> None:
    async with opened(redis_url) as hosts:
        intake = await hosts.intake("e-b", "b")
        await hosts.register(record("e-a", "a", num_slots=0))  # it has no room
        await hosts.open_stream("a")
        await hosts.publish("a", "1")
        await hosts.publish("b", "2")
        own = await taken(intake)
        assert mark_of(own) == "2"
        await own.ack()
        spare = await taken(intake)
        assert (mark_of(spare), spare.stream) == ("1", hosts.bus.names.encode_jobs(DIGEST, "a"))
        await spare.ack()
        assert await hosts.bus.stream_length(spare.stream) == 0


async def test_what_near_encoders_are_about_to_take_is_theirs(redis_url: str) -> None:
    """Two jobs for one slot: the other encoder gets one of them."""
    async with opened(redis_url) as hosts:
        intake = await hosts.intake("e-b", "b")
        await hosts.register(record("e-a", "a", num_slots=1))
        await hosts.open_stream("a")
        await hosts.publish("a", "1")
        await hosts.publish("a", "2")
        spare = await taken(intake)
        assert mark_of(spare) == "1"
        stream = hosts.bus.names.encode_jobs(DIGEST, "a")
        near = hosts.bus.consumer(stream, group=ENCODERS_GROUP, consumer="e-a")
        async with near:
            assert mark_of(await anext(near)) == "2"


async def test_one_spare_job_at_a_time(redis_url: str) -> None:
    """It takes a slot of its own stream's, and the next one is not taken before it is done."""
    async with opened(redis_url) as hosts:
        intake = await hosts.intake("e-b", "b", num_slots=2)
        await hosts.register(record("e-a", "a", num_slots=0))
        await hosts.open_stream("a")
        for mark in "12":
            await hosts.publish("a", mark)
        first = await taken(intake)
        assert mark_of(first) == "1"
        for mark in "34":
            await hosts.publish("b", mark)
        own = await taken(intake)
        assert mark_of(own) == "3", "the other slot"
        next_one = asyncio.ensure_future(taken(intake))
        await own.ack()
        last = await next_one
        assert mark_of(last) == "4", "own ones first, though the spare one still runs"
        await last.ack()
        await first.ack()
        assert mark_of(await taken(intake)) == "2"


async def test_a_job_for_near_encoders_alone_is_left_to_them(redis_url: str) -> None:
    async with opened(redis_url) as hosts:
        intake = await hosts.intake("e-c", "c")
        near = Registry(hosts.bus).keep_registered(record("e-a", "a", num_slots=0))
        await hosts.register(record("e-b", "b", num_slots=0))
        for store in "ab":
            await hosts.open_stream(store)
        async with near:
            await hosts.publish("a", "1", spare_after_ms=None)
            await hosts.publish("b", "2")
            spare = await taken(intake)
            assert mark_of(spare) == "2"
            await spare.ack()
            assert await hosts.bus.stream_length(hosts.bus.names.encode_jobs(DIGEST, "a")) == 1


async def test_with_a_job_in_hand_it_reads_as_long_as_any_reader(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    take_within = StreamConsumer.take_within

    async def watched(self: StreamConsumer, block_ms: int) -> Delivery | None:
        waits.append(block_ms)
        return await take_within(self, block_ms)

    monkeypatch.setattr(StreamConsumer, "take_within", watched)
    async with opened(redis_url) as hosts:
        intake = await hosts.intake("e-b", "b")
        await hosts.register(record("e-a", "a", num_slots=0))
        await hosts.open_stream("a")
        await hosts.publish("b", "1")
        own = await taken(intake)
        await hosts.publish("a", "2")
        next_one = asyncio.ensure_future(taken(intake))
        await until(lambda: len(waits) == 2)
        await own.ack()
        assert mark_of(await next_one) == "2", "it looks again when that is done"
        assert waits == [LOOK_INTERVAL_MS, BLOCK_MS]


async def test_a_draining_encoder_takes_nothing_more(redis_url: str) -> None:
    async with opened(redis_url) as hosts:
        intake = await hosts.intake("e-b", "b")
        await hosts.register(record("e-a", "a", num_slots=0))
        await hosts.open_stream("a")
        intake.stop()
        await hosts.publish("a", "1")
        with pytest.raises(StopAsyncIteration):
            await taken(intake)
        assert await hosts.bus.stream_length(hosts.bus.names.encode_jobs(DIGEST, "a")) == 1


async def test_a_spare_job_is_handed_back_with_the_others(redis_url: str) -> None:
    async with opened(redis_url) as hosts:
        intake = await hosts.intake("e-b", "b")
        await hosts.register(record("e-a", "a", num_slots=0))
        await hosts.open_stream("a")
        await hosts.publish("a", "1")
        spare = await taken(intake)
        await spare.hand_back()
        stream = hosts.bus.names.encode_jobs(DIGEST, "a")
        near = hosts.bus.consumer(stream, group=ENCODERS_GROUP, consumer="e-a", min_idle_ms=600_000)
        async with near, asyncio.timeout(LIMIT_S):
            again = await anext(near)
            assert (mark_of(again), again.num_deliveries) == ("1", 1)


async def test_encoders_of_one_store_look_at_no_other_stream(redis_url: str, monkeypatch: Any) -> None:
    async with opened(redis_url) as hosts:
        intake = await hosts.intake("e-b", "b")
        await hosts.register(record("e-b2", "b"))
        await hosts.register(record("e-a", "a", namespace_digest="e" * 64))  # of another namespace
        monkeypatch.setattr("triptych_common.bus.consumer_group.ConsumerGroup.take_spare", _never)
        taking = asyncio.ensure_future(taken(intake))
        await until_async(lambda: hosts.bus.client.exists(hosts.bus.names.encode_jobs(DIGEST, "b")))
        await hosts.publish("b", "1")
        assert mark_of(await taking) == "1"


# ---- a job on the stream of another namespace ----------------------------------------------------
ANOTHER = "e" * 64
STRAYED = job("f" * 64).model_copy(update={"namespace_digest": ANOTHER})


async def test_it_is_kept_as_a_dead_letter_and_can_be_sent_where_it_belongs(
    redis_url: str, store: StoreProcess
) -> None:
    async with working(redis_url, store, drain_timeout_s=60) as bench, asyncio.timeout(LIMIT_S):
        bus, flights = bench.bus, SingleFlight(bench.bus)
        claimed = await flights.claim_flight(
            STRAYED.mm_hash, STRAYED.requesters, namespace_digest=ANOTHER, mode="new",
            job_id=STRAYED.job_id, attempt=1, max_attempts=1, ttl_s=60,
        )  # fmt: skip
        assert claimed.result is ClaimResult.OWNER
        await flights.publish_job(JobOffer(STRAYED, remaining_ms=60_000, blob=b"media"))
        await bus.publish(bus.names.encode_jobs(DIGEST), STRAYED, remaining_ms=60_000, blob=b"media")
        await until_async(lambda: bus.stream_length(bus.names.dead_letters))
        (letter,) = await peek(bus, "dead-letters", 9)
        assert letter.fields["reason"] == b"job of another namespace than the stream's"
        assert letter.fields["source_stream"] == bus.names.encode_jobs(DIGEST).encode()
        assert await bus.stream_length(bus.names.encode_jobs(DIGEST)) == 0
        assert await bus.stream_length(bus.names.encode_jobs(ANOTHER)) == 1
        assert await bus.stream_length(bus.names.encode_results("gateway-0")) == 0  # no failure is sent
        joined = await flights.claim_flight(
            STRAYED.mm_hash, STRAYED.requesters, namespace_digest=ANOTHER, mode="check",
            job_id=STRAYED.job_id, attempt=1, max_attempts=1, ttl_s=60,
        )  # fmt: skip
        assert (joined.result, joined.attempt, joined.failure) == (ClaimResult.JOINED, 1, None)
