"""What a gateway learns that checks a flight it has received nothing of."""

from tests.integration.common.flight_samples import DIGEST, HASH, METADATA, claim, job_for, requester_at
from triptych_common.bus import AsyncBus
from triptych_common.coordination import ClaimResult, JobOffer, SingleFlight, StartResult
from triptych_common.protocol.names import DEFAULT_STORE

FIRST, SECOND = requester_at("first"), requester_at("second")
JOB = job_for(FIRST)


async def run(flights: SingleFlight) -> None:
    """Publish, and start."""
    entry_id = await flights.publish_job(JobOffer(JOB))
    assert entry_id is not None
    start, _ = await flights.start_job(JOB, entry_id, "e", lease_s=600.0, ttl_s=600.0)
    assert start is StartResult.STARTED


async def test_a_gateway_that_knows_its_job_does_not_take_the_claim_of_another(flights: SingleFlight) -> None:
    assert (await claim(flights, FIRST, "new")).result is ClaimResult.OWNER
    assert (await claim(flights, SECOND, "check")).result is ClaimResult.JOINED
    assert (await claim(flights, FIRST, "new")).result is ClaimResult.OWNER  # its answer was lost


async def test_a_result_that_did_not_arrive_is_sent_again(flights: SingleFlight) -> None:
    await claim(flights, FIRST, "new")
    await run(flights)
    await flights.announce_metadata(METADATA, namespace_digest=DIGEST)
    assert (await flights.finish_flight(METADATA, [(FIRST.request_id, 0)], namespace_digest=DIGEST))[0]
    found = await claim(flights, FIRST, "check")
    assert (found.result, found.metadata) == (ClaimResult.JOINED, METADATA)


async def test_a_finished_flight_whose_result_is_lost_begins_again(
    flights: SingleFlight, bus: AsyncBus
) -> None:
    """Redis lost it, with all messages, between the encoder's announcement and its end."""
    await claim(flights, FIRST, "new")
    await run(flights)
    await flights.announce_metadata(METADATA, namespace_digest=DIGEST)
    await bus.client.delete(bus.names.inflight(DIGEST, HASH))
    await claim(flights, FIRST, "check")
    assert (await flights.finish_flight(METADATA, [(FIRST.request_id, 0)], namespace_digest=DIGEST))[0]
    found = await claim(flights, FIRST, "check")
    assert (found.result, found.job_id) == (ClaimResult.OWNER, "job-1")
    await run(flights)


async def test_an_owner_gets_what_waits_before_it_publishes(flights: SingleFlight, bus: AsyncBus) -> None:
    """And no other claim does: it has nothing to publish."""
    stream = bus.names.encode_jobs(DIGEST)
    await bus.client.xadd(stream, {"waits": "since 1970"}, id="1-1")
    for _ in range(2):
        await bus.client.xadd(stream, {"waits": "not long"})
    owner = await claim(flights, FIRST, with_backlog=True)
    assert owner.backlogs is not None
    before = owner.backlogs[DEFAULT_STORE]
    assert before.num_jobs == 3
    assert before.oldest_s > 1e9
    assert (await flights.read_backlogs(DIGEST))[DEFAULT_STORE] >= before
    assert (await claim(flights, SECOND, job_id="job-2", with_backlog=True)).backlogs is None
    assert (await claim(flights, FIRST)).backlogs is None, "not asked for"
