"""A job on a stream whose encoders are gone goes to those of another store, once."""

from typing import Any

from tests.integration.common.flight_samples import DIGEST, HASH, job_for, requester_at
from triptych_common.bus import AsyncBus
from triptych_common.coordination import ClaimResult, FlightClaim, JobOffer, SingleFlight, StartResult

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


async def test_moves_are_bounded(flights: SingleFlight) -> None:
    await published(flights, "a")
    for store in ("b", "a", "b"):
        assert (await claim(flights, store)).result is ClaimResult.OWNER
        await flights.publish_job(JobOffer(JOB, store=store))
    assert (await claim(flights, "a")).result is ClaimResult.EXHAUSTED


async def test_a_stream_lasts_as_long_as_a_requester_waits_for_its_job(
    flights: SingleFlight, bus: AsyncBus
) -> None:
    await published(flights, "a")
    await claim(flights, "b", has_encoders=False, ttl_s=5000.0)
    assert await bus.client.ttl(bus.names.encode_jobs(DIGEST, "a")) > 4000
