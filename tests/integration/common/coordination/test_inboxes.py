"""Streams of instances and namespaces that never come back: they end, even if others still write to them."""

from typing import Any

from tests.integration.common.flight_samples import DIGEST, HASH, claim, job_for, requester_at
from tests.support.waiting import until_async
from triptych_common.bus import AsyncBus, ThreadedBus, drop_idle_consumers
from triptych_common.coordination import ClaimResult, JobOffer, Registry, SingleFlight
from triptych_common.protocol.messages import EncodeCompleted, InstanceRecord, Role, requester_key
from triptych_common.protocol.names import (
    ENCODERS_GROUP,
    INBOX_TTL_S,
    JOBS_TTL_S,
    OWNER_GROUP,
    inboxes,
)

RECORD = InstanceRecord(instance="pd-0", boot_id="b-1", role=Role.PREFILL_DECODE, num_slots=4)
ENCODER = InstanceRecord(instance="e", boot_id="b-1", role=Role.ENCODE, namespace_digest=DIGEST)
MESSAGE = EncodeCompleted(job_id="job-1", mm_hash="ab" * 32, encoder="e", encode_s=0)


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


async def test_jobs_last_as_long_as_a_requester_may_wait_for_one(
    bus: AsyncBus, flights: SingleFlight, raw: Any
) -> None:
    stream, requester = bus.names.encode_jobs(DIGEST), requester_at("g-0")
    for remaining_s in (10, 2 * JOBS_TTL_S):
        await claim(flights, requester, ttl_s=remaining_s)
        await flights.publish_job(JobOffer(job_for(requester), remaining_ms=remaining_s * 1000))
        assert max(remaining_s, JOBS_TTL_S) - 5 < raw.ttl(stream) <= max(remaining_s, JOBS_TTL_S)
        await flights.leave_flight(HASH, [requester_key(requester)], namespace_digest=DIGEST)
    await claim(flights, requester, ttl_s=9)
    await flights.publish_job(JobOffer(job_for(requester), remaining_ms=1000))
    await claim(flights, requester_at("g-1"), ttl_s=3 * JOBS_TTL_S)  # it joins, and waits longer
    assert 3 * JOBS_TTL_S - 5 < raw.ttl(stream) <= 3 * JOBS_TTL_S
    async with Registry(bus).keep_registered(ENCODER):
        assert raw.ttl(stream) > 2 * JOBS_TTL_S  # a heartbeat shortens nothing


async def test_heartbeats_of_encoders_keep_the_jobs_of_their_namespace(bus: AsyncBus, raw: Any) -> None:
    streams = [bus.names.encode_jobs(digest) for digest in (DIGEST, "e" * 64)]
    for stream in streams:
        raw.xgroup_create(stream, ENCODERS_GROUP, id="0", mkstream=True)
    async with Registry(bus).keep_registered(ENCODER):
        assert JOBS_TTL_S - 5 < raw.ttl(streams[0]) <= JOBS_TTL_S
        assert raw.ttl(streams[1]) == -1
    assert raw.ttl(streams[0]) > 0  # the last encoder has left: it ends by itself


async def test_an_encoder_that_dies_at_once_leaves_no_stream_for_ever(bus: AsyncBus, raw: Any) -> None:
    stream = bus.names.encode_jobs(DIGEST)
    async with bus.consumer(stream, group=ENCODERS_GROUP, consumer="e") as consumer:
        await consumer._ensure_group()
        assert JOBS_TTL_S - 5 < raw.ttl(stream) <= JOBS_TTL_S


async def test_a_job_whose_stream_is_gone_is_sent_again(
    bus: AsyncBus, flights: SingleFlight, raw: Any
) -> None:
    """Its encoders were away for too long; another one comes."""
    requester = requester_at("g-0")
    await claim(flights, requester, ttl_s=60)
    await flights.publish_job(JobOffer(job_for(requester)))
    raw.delete(bus.names.encode_jobs(DIGEST))
    found = await claim(flights, requester, "check", ttl_s=60)
    assert (found.result, found.job_id, found.attempt) == (ClaimResult.OWNER, "job-1", 1)
    entry_id = await flights.publish_job(JobOffer(job_for(requester)))
    async with bus.consumer(bus.names.encode_jobs(DIGEST), group=ENCODERS_GROUP, consumer="e") as consumer:
        assert (await anext(consumer)).entry_id == entry_id


async def test_cleared_when_its_owner_has_left(bus: AsyncBus, raw: Any) -> None:
    registry = Registry(bus)
    async with registry.keep_registered(RECORD):
        for inbox in inboxes(bus.names, "pd-0"):
            await bus.publish(inbox, MESSAGE)
        await bus.publish(bus.names.metadata("pd-1"), MESSAGE)
        await registry.clear_inboxes("pd-0")
        assert raw.exists(*inboxes(bus.names, "pd-0")) == len(
            inboxes(bus.names, "pd-0")
        )  # it is registered: a process reads them
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
    assert await drop_idle_consumers(bus, stream, ENCODERS_GROUP) == 0  # not idle for long
    await until_async(lambda: drop_idle_consumers(bus, stream, ENCODERS_GROUP, idle_ms=1))
    (left,) = raw.xinfo_consumers(stream, ENCODERS_GROUP)
    assert (left["name"], left["pending"]) == (b"e-holds", 1)
    assert await drop_idle_consumers(bus, stream, "no-group", idle_ms=0) == 0
