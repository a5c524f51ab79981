"""A job on a stream whose encoders are gone goes to those of another store, once."""

from typing import Any

from tests.integration.common.flight_samples import DIGEST, HASH, job_for, requester_at
from triptych_common.bus import AsyncBus
from triptych_common.coordination import ClaimResult, FlightClaim, JobOffer, SingleFlight, StartResult
from triptych_common.protocol.names import ENCODERS_GROUP

FIRST, SECOND = requester_at("first"), requester_at("second")
JOB = job_for(FIRST)


async def claim(flights: SingleFlight, *stores: str, **changes: Any) -> FlightClaim:
    """A check by a gateway that knows of encoders at `stores`."""
    values: dict[str, Any] = {
        "namespace_digest": DIGEST,
        "mode": "check",
        "job_id": "job-1",
        "attempt": 1,
        "max_attempts": 2,
        "ttl_s": 600.0,
    }
    return await flights.claim_flight(HASH, [FIRST], stores=stores, **values | changes)


async def published(flights: SingleFlight, store: str) -> str:
    assert (await claim(flights, store, mode="new")).result is ClaimResult.OWNER
    entry_id = await flights.publish_job(JobOffer(JOB, store=store))
    assert entry_id is not None
    return entry_id


async def lengths(bus: AsyncBus) -> dict[str, int]:
    return {each: await bus.stream_length(bus.names.encode_jobs(DIGEST, each)) for each in ("a", "b")}


async def test_a_waiting_job_moves_when_its_encoders_are_gone(flights: SingleFlight, bus: AsyncBus) -> None:
    await published(flights, "a")
    assert (await claim(flights, "a", "b")).result is ClaimResult.JOINED
    moved = await claim(flights, "b")
    assert (moved.result, moved.job_id, moved.attempt) == (ClaimResult.OWNER, "job-1", 1)
    assert await lengths(bus) == {"a": 0, "b": 0}
    assert await flights.publish_job(JobOffer(JOB, store="b"))
    assert await lengths(bus) == {"a": 0, "b": 1}
    assert (await claim(flights, "b")).result is ClaimResult.JOINED


async def test_without_any_encoder_it_stays_where_it_is(flights: SingleFlight, bus: AsyncBus) -> None:
    await published(flights, "a")
    assert (await claim(flights, "b", has_encoders=False)).result is ClaimResult.JOINED
    assert await lengths(bus) == {"a": 1, "b": 0}


async def test_a_job_in_hand_moves_when_its_lease_is_over(flights: SingleFlight, bus: AsyncBus) -> None:
    entry_id = await published(flights, "a")
    stream = bus.names.encode_jobs(DIGEST, "a")
    await bus.client.xgroup_create(stream, ENCODERS_GROUP, id="0")
    await bus.client.xreadgroup(ENCODERS_GROUP, "e", {stream: ">"})
    await flights.start_job(JOB, entry_id, "e", lease_s=600, ttl_s=600, stream=stream)
    assert (await claim(flights, "b")).result is ClaimResult.JOINED, "its encoder lives"
    await bus.client.hset(bus.names.inflight(DIGEST, HASH), "until", "0")
    assert (await claim(flights, "a")).result is ClaimResult.JOINED, "others of its store take it over"
    assert (await claim(flights, "b")).result is ClaimResult.OWNER
    assert (await bus.client.xpending(stream, ENCODERS_GROUP))["pending"] == 0
    assert await lengths(bus) == {"a": 0, "b": 0}


async def test_an_encoder_that_lives_after_all_and_another_do_not_both_work(
    flights: SingleFlight, bus: AsyncBus
) -> None:
    """A gateway took its encoders for gone while one of them took the job."""
    entry_id = await published(flights, "a")
    await claim(flights, "b")
    moved_id = await flights.publish_job(JobOffer(JOB, store="b"))
    assert moved_id is not None
    at_a: Any = {"lease_s": 600, "ttl_s": 600, "stream": bus.names.encode_jobs(DIGEST, "a")}
    at_b = at_a | {"stream": bus.names.encode_jobs(DIGEST, "b")}
    assert (await flights.start_job(JOB, entry_id, "e-a", **at_a))[0] is StartResult.STARTED
    assert (await flights.start_job(JOB, moved_id, "e-b", **at_b))[0] is StartResult.SUPERSEDED


async def test_equal_ids_on_two_streams_are_two_entries(flights: SingleFlight, bus: AsyncBus) -> None:
    """Redis gives ids by its clock, in each stream by itself."""
    entry_id = await published(flights, "a")
    at_a: Any = {"lease_s": 600, "ttl_s": 600, "stream": bus.names.encode_jobs(DIGEST, "a")}
    at_b = at_a | {"stream": bus.names.encode_jobs(DIGEST, "b")}
    assert (await flights.start_job(JOB, entry_id, "e-a", **at_a))[0] is StartResult.STARTED
    assert (await flights.start_job(JOB, entry_id, "e-b", **at_b))[0] is StartResult.SUPERSEDED
    assert (await flights.start_job(JOB, entry_id, "e-a", **at_a))[0] is StartResult.STARTED


async def test_moves_are_bounded(flights: SingleFlight) -> None:
    await published(flights, "a")
    for store in ("b", "a", "b"):
        assert (await claim(flights, store)).result is ClaimResult.OWNER
        await flights.publish_job(JobOffer(JOB, store=store))
    assert (await claim(flights, "a")).result is ClaimResult.EXHAUSTED


async def test_the_last_requester_that_leaves_takes_the_job_from_its_stream(
    flights: SingleFlight, bus: AsyncBus
) -> None:
    await published(flights, "b")
    assert await flights.leave_flight(HASH, [(FIRST.request_id, 0)], namespace_digest=DIGEST)
    assert await lengths(bus) == {"a": 0, "b": 0}


async def test_backlogs_by_store(flights: SingleFlight) -> None:
    await published(flights, "b")
    found = await flights.read_backlogs(DIGEST, ["a", "b", "c"])
    assert {store: each.num_jobs for store, each in found.items()} == {"a": 0, "b": 1, "c": 0}


async def test_a_stream_lasts_as_long_as_a_requester_waits_for_its_job(
    flights: SingleFlight, bus: AsyncBus
) -> None:
    await published(flights, "a")
    await claim(flights, "b", has_encoders=False, ttl_s=5000.0)
    assert await bus.client.ttl(bus.names.encode_jobs(DIGEST, "a")) > 4000
