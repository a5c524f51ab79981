"""Redis commands of one new item, scripts and what is inside of them, where all goes as usual."""

from collections import Counter
from typing import Any

from tests.integration.common.flight_samples import DIGEST, HASH, METADATA, claim, job_for, requester_at
from triptych_common.bus import AsyncBus
from triptych_common.coordination import ClaimResult, JobOffer, SharedSizes, SingleFlight, StartResult
from triptych_common.protocol.names import DEFAULT_STORE, ENCODERS_GROUP

REQUESTER = requester_at("a")
KEY = (REQUESTER.request_id, REQUESTER.item_index)
EXPECTED = Counter(
    {
        "evalsha": 5,
        "hset": 4,
        "hgetall": 3,
        "pexpire": 2,
        "hmget": 1,
        "xlen": 1,
        "xadd": 1,
        "pttl": 1,
        "time": 1,
    }
    | {"del": 1, "rpush": 1}
)
"""Claim with publication, start with announcement, finish, leave, and the item's sizes."""
OWN = {"config", "info", "xdel"}  # the test's


async def new_item(bus: AsyncBus, flights: SingleFlight, sizes: SharedSizes, mm_hash: str) -> None:
    job = job_for(REQUESTER).model_copy(update={"mm_hash": mm_hash})
    metadata = METADATA.model_copy(update={"mm_hash": mm_hash})
    claim = await flights.claim_flight(
        mm_hash, [REQUESTER], namespace_digest=DIGEST, mode="new", job_id=job.job_id, attempt=1,
        max_attempts=2, ttl_s=60, with_backlog=True, offer=JobOffer(job, remaining_ms=60_000),
    )  # fmt: skip
    assert (claim.result, bool(claim.entry_id)) == (ClaimResult.OWNER, True)
    start, found = await flights.start_job(job, claim.entry_id, "e", lease_s=9, ttl_s=60, metadata=metadata)
    assert (start, found) == (StartResult.STARTED, (REQUESTER,))
    await sizes.set(mm_hash, b"{}")
    assert await flights.finish_flight(metadata, [KEY], namespace_digest=DIGEST) == (True, (REQUESTER,))
    await flights.leave_flight(mm_hash, [KEY], namespace_digest=DIGEST)
    await bus.client.xdel(bus.names.encode_jobs(DIGEST), claim.entry_id)


async def test_commands_of_a_new_item(bus: AsyncBus, flights: SingleFlight) -> None:
    stream, sizes = bus.names.encode_jobs(DIGEST), SharedSizes(bus, max_items=100, ttl_s=600)
    await bus.client.xgroup_create(stream, ENCODERS_GROUP, id="0", mkstream=True)
    await bus.client.pexpire(stream, 600_000)
    await new_item(bus, flights, sizes, "b" * 64)  # scripts are known, and keys have their lifetimes
    await new_item(bus, flights, sizes, "c" * 64)
    await bus.client.config_resetstat()
    await new_item(bus, flights, sizes, HASH)
    stats: Any = await bus.client.info("commandstats")
    calls = {name.removeprefix("cmdstat_"): value["calls"] for name, value in stats.items()}
    assert {name: each for name, each in calls.items() if name.partition("|")[0] not in OWN} == EXPECTED


async def test_an_offered_job_is_left_while_another_waits_for_too_long(
    bus: AsyncBus, flights: SingleFlight
) -> None:
    offer = JobOffer(job_for(REQUESTER), max_oldest_s=0.001)
    await bus.client.xadd(bus.names.encode_jobs(DIGEST), {"any": "job"}, id="1-1")  # as of 1970
    claim = await flights.claim_flight(
        HASH, [REQUESTER], namespace_digest=DIGEST, mode="new", job_id=offer.job.job_id, attempt=1,
        max_attempts=2, ttl_s=60, with_backlog=True, offer=offer,
    )  # fmt: skip
    assert (claim.result, claim.entry_id) == (ClaimResult.OWNER, "")
    assert claim.backlogs is not None
    assert [each.num_jobs for each in claim.backlogs.values()] == [1]
    assert await flights.publish_job(offer)


FIRST, SECOND = requester_at("first"), requester_at("second")


async def test_an_owner_gets_what_waits_before_it_publishes(flights: SingleFlight, bus: AsyncBus) -> None:
    """Only the owner's claim returns backlogs: one that joins has nothing to publish."""
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
