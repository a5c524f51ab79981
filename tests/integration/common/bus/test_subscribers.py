"""Who waits for a flight: nobody beyond its own time, however long others keep the flight alive."""

import asyncio
from typing import Literal

from tests.integration.common.bus.flight_samples import DIGEST, HASH, METADATA, job_for, requester_at
from tests.integration.common.bus.samples import LIMIT_S
from triptych_common.bus import AsyncBus
from triptych_common.coordination import SingleFlight, StartResult
from triptych_common.protocol.messages import Requester

SHORT_S, LONG_S = 0.05, 600.0
DEAD, ALIVE = requester_at("dead"), requester_at("alive")
JOB = job_for(DEAD)


async def claim(flights: SingleFlight, who: Requester, mode: Literal["new", "check"], ttl_s: float) -> None:
    await flights.claim_flight(
        HASH,
        [who],
        namespace_digest=DIGEST,
        mode=mode,
        job_id="job-1",
        attempt=1,
        max_attempts=2,
        ttl_s=ttl_s,
    )


async def until_alone(flights: SingleFlight) -> None:
    """Redis' clock wakes nobody."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            if await flights.announce_metadata(METADATA) == (ALIVE,):
                return
            await asyncio.sleep(0.01)


async def test_whose_gateway_died_is_forgotten_though_others_wait_on(flights: SingleFlight) -> None:
    await claim(flights, DEAD, "new", SHORT_S)
    await claim(flights, ALIVE, "new", LONG_S)
    assert await flights.announce_metadata(METADATA) is not None
    await until_alone(flights)
    is_finished, waiting = await flights.finish_flight(HASH, "job-1", [(ALIVE.request_id, 0)])
    assert (is_finished, waiting) == (True, (ALIVE,))


async def test_who_asks_again_waits_on(flights: SingleFlight) -> None:
    await claim(flights, DEAD, "new", SHORT_S)
    await claim(flights, ALIVE, "new", SHORT_S)
    await claim(flights, ALIVE, "check", LONG_S)
    await until_alone(flights)


async def test_whom_a_lost_flight_takes_from_its_job_waits_as_long_as_the_job(
    flights: SingleFlight, bus: AsyncBus
) -> None:
    await claim(flights, DEAD, "new", LONG_S)
    entry_id = await flights.publish_job(JOB)
    assert entry_id is not None
    await bus.client.delete(bus.names.inflight(HASH))
    start, _ = await flights.start_job(JOB, entry_id, "e", lease_s=SHORT_S, ttl_s=SHORT_S)
    assert start is StartResult.STARTED
    await claim(flights, ALIVE, "new", LONG_S)
    await until_alone(flights)
