"""Redis is full and evicts nothing: publishers get an error, reads and acks go on, and it heals."""

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

from tests.conftest import EmbeddedRedis
from tests.integration.common.flight_samples import DIGEST
from tests.integration.common.samples import (
    LIMIT_S,
    STREAM,
    consuming_bus,
    ids,
    message,
    take,
)
from tests.support.message_samples import encode_job
from tests.support.waiting import until
from triptych_common.bus import AsyncBus
from triptych_common.bus import dead_letters as bus_dead_letters
from triptych_common.coordination import JobOffer, Registry, SingleFlight, StartResult
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import (
    EncodeFailed,
    FailureKind,
    InstanceRecord,
    Requester,
    Role,
)


@pytest.fixture
def raw(own_redis: EmbeddedRedis) -> Iterator[Any]:
    with closing(redis.Redis.from_url(own_redis.url)) as client:
        yield client


@contextlib.contextmanager
def full(raw: Any) -> Iterator[None]:
    raw.config_set("maxmemory", "1")
    try:
        yield
    finally:
        raw.config_set("maxmemory", "0")


async def test_publishers_get_an_error_and_readers_go_on(own_redis: EmbeddedRedis, raw: Any) -> None:
    async with consuming_bus(own_redis.url) as (bus, consumer):
        for number in (1, 2, 3):
            await bus.publish(STREAM, message(number))
        assert await take(consumer, 1) == ids(1)
        with full(raw):
            with pytest.raises(BusUnavailableError, match="publish: Redis is out of memory"):
                await bus.publish(STREAM, message(4))
            assert await take(consumer, 2) == ids(2, 3)
            assert await bus.stream_length(STREAM) == 0
        await bus.publish(STREAM, message(5))
        assert await take(consumer, 1) == ids(5)


async def test_a_consumer_that_reconnects_reads_on(own_redis: EmbeddedRedis, raw: Any) -> None:
    async with consuming_bus(own_redis.url) as (bus, consumer):
        for number in (1, 2):
            await bus.publish(STREAM, message(number))
        assert await take(consumer, 1) == ids(1)
        with full(raw):
            raw.client_kill_filter(_type="normal", skipme=True)
            assert await take(consumer, 1) == ids(2)


async def test_a_consumer_without_a_group_waits_for_memory(own_redis: EmbeddedRedis, raw: Any) -> None:
    async with consuming_bus(own_redis.url) as (bus, consumer):
        with full(raw):
            taking = asyncio.ensure_future(take(consumer, 1))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(taking), 0.5)
        await bus.publish(STREAM, message(1))
        assert await taking == ids(1)


async def test_a_dead_letter_does_not_block_those_behind_it(
    own_redis: EmbeddedRedis, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_dead_letters, "ATTEMPTS", 3)
    async with consuming_bus(own_redis.url) as (bus, consumer):
        await bus.publish(STREAM, message(0))
        assert await take(consumer, 1) == ids(0)
        raw.xadd(STREAM, {"v": "1", "type": "nonsense", "body": "{}"})
        await bus.publish(STREAM, message(1))
        with full(raw):
            assert await take(consumer, 1) == ids(1)
        assert raw.xlen(STREAM) == 0
        assert raw.xlen(bus.names.dead_letters) == 0


async def test_a_dead_letter_waits_a_moment_for_memory(own_redis: EmbeddedRedis, raw: Any) -> None:
    async with consuming_bus(own_redis.url) as (bus, consumer):
        await bus.publish(STREAM, message(0))
        assert await take(consumer, 1) == ids(0)
        raw.xadd(STREAM, {"v": "1", "type": "nonsense", "body": "{}"})
        await bus.publish(STREAM, message(1))
        with full(raw):
            taking = asyncio.ensure_future(take(consumer, 1))
            await until(lambda: raw.xpending(STREAM, "g")["pending"])
        assert await taking == ids(1)
        assert raw.xlen(bus.names.dead_letters) == 1


async def test_living_instances_stay_registered(own_redis: EmbeddedRedis, raw: Any) -> None:
    """A heartbeat that cannot be stored still prolongs the record's life: text requests need it."""
    record = InstanceRecord(instance="pd-0", boot_id="b-1", role=Role.PREFILL_DECODE)
    async with (
        await AsyncBus.connect(own_redis.url, "test", client_name="tests") as bus,
        asyncio.timeout(LIMIT_S),
    ):
        registry = Registry(bus)
        async with registry.keep_registered(record, interval_s=0.05, ttl_s=120.0):
            with full(raw):
                key = bus.names.instance("pd-0")
                raw.expire(key, 60)
                await until(lambda: raw.ttl(key) > 60)
                assert await registry.list_instances() == [record]


async def test_a_job_whose_start_was_not_noted_can_fail(own_redis: EmbeddedRedis, raw: Any) -> None:
    requester = Requester(request_id="r", item_index=0, gateway="g-0", prefill_decode="pd-0")
    job = encode_job(requester, media_url="http://gateway/media", namespace_digest=DIGEST)
    failure = EncodeFailed(
        job_id=job.job_id, mm_hash=job.mm_hash, encoder="e-0", kind=FailureKind.ENCODER_ERROR, detail="x"
    )
    async with (
        await AsyncBus.connect(own_redis.url, "test", client_name="tests") as bus,
        asyncio.timeout(LIMIT_S),
    ):
        flights = SingleFlight(bus)
        await flights.claim_flight(
            job.mm_hash,
            [requester],
            namespace_digest=DIGEST,
            mode="new",
            job_id=job.job_id,
            attempt=1,
            max_attempts=2,
            ttl_s=9,
        )
        entry_id = await flights.publish_job(JobOffer(job))
        assert entry_id is not None
        with full(raw):
            started = await flights.start_job(job, entry_id, "e-0", lease_s=9, ttl_s=9)
            assert started == (StartResult.STARTED, (requester,))
        assert await flights.fail_flight(failure, namespace_digest=DIGEST) == (requester,)
