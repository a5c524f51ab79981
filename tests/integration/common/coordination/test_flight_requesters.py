"""Requesters of a flight: none waits beyond its own time, however long others keep the flight alive."""

from tests.integration.common.flight_samples import DIGEST, HASH, METADATA, claim, job_for, requester_at
from tests.support.waiting import until_async
from triptych_common.bus import AsyncBus
from triptych_common.coordination import JobOffer, SingleFlight, StartResult

SHORT_S, LONG_S = 0.05, 600.0
DEAD, ALIVE = requester_at("dead"), requester_at("alive")
JOB = job_for(DEAD)


async def until_alone(flights: SingleFlight) -> None:
    """Redis' clock wakes no waiting caller."""

    async def is_alone() -> bool:
        return await flights.announce_metadata(METADATA, namespace_digest=DIGEST) == (ALIVE,)

    await until_async(is_alone)


async def test_whose_gateway_died_is_forgotten_though_others_wait_on(flights: SingleFlight) -> None:
    await claim(flights, DEAD, "new", ttl_s=SHORT_S)
    await claim(flights, ALIVE, "new", ttl_s=LONG_S)
    assert await flights.announce_metadata(METADATA, namespace_digest=DIGEST) is not None
    await until_alone(flights)
    is_finished, waiting = await flights.finish_flight(
        METADATA, [(ALIVE.request_id, 0)], namespace_digest=DIGEST
    )
    assert (is_finished, waiting) == (True, (ALIVE,))


async def test_a_requester_that_claims_again_waits_on(flights: SingleFlight) -> None:
    await claim(flights, DEAD, "new", ttl_s=SHORT_S)
    await claim(flights, ALIVE, "new", ttl_s=SHORT_S)
    await claim(flights, ALIVE, "check", ttl_s=LONG_S)
    await until_alone(flights)


async def test_whom_a_lost_flight_takes_from_its_job_waits_as_long_as_the_job(
    flights: SingleFlight, bus: AsyncBus
) -> None:
    await claim(flights, DEAD, "new", ttl_s=LONG_S)
    entry_id = await flights.publish_job(JobOffer(JOB))
    assert entry_id is not None
    await bus.client.delete(bus.names.inflight(DIGEST, HASH))
    start, _ = await flights.start_job(JOB, entry_id, "e", lease_s=SHORT_S, ttl_s=SHORT_S)
    assert start is StartResult.STARTED
    await claim(flights, ALIVE, "new", ttl_s=LONG_S)
    await until_alone(flights)
