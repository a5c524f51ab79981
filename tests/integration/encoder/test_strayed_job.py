"""A job on the stream of another namespace is refused, and its item loses nothing. Real Redis, real store."""

import asyncio

from tests.integration.encoder.test_drain import DIGEST, LIMIT_S, job, working
from tests.support.stores import StoreProcess
from tests.support.waiting import until_async
from triptych_common.bus.inspection import peek
from triptych_common.coordination import ClaimResult, JobOffer, SingleFlight

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
