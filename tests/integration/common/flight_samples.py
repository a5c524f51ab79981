"""One job of one flight, as the tests of flights send it, and the requesters of its item."""

from tests.support.message_samples import cache_metadata, encode_job
from triptych_common.coordination import FlightClaim, SingleFlight
from triptych_common.coordination.single_flight import ClaimMode
from triptych_common.protocol.messages import EncodeJob, Requester

HASH = "a" * 64
DIGEST = "d" * 64


def requester_at(gateway: str) -> Requester:
    return Requester(request_id=f"of-{gateway}", item_index=0, gateway=gateway, prefill_decode="pd-0")


def job_for(requester: Requester) -> EncodeJob:
    return encode_job(requester, mm_hash=HASH, namespace_digest=DIGEST)


METADATA = cache_metadata(mm_hash=HASH, width=1, num_bytes=4, sealed=True)


async def claim(
    flights: SingleFlight,
    requester: Requester,
    mode: ClaimMode = "new",
    *,
    ttl_s: float = 600.0,
    job_id: str = "job-1",
    max_attempts: int = 2,
    with_backlog: bool = False,
) -> FlightClaim:
    return await flights.claim_flight(
        HASH,
        [requester],
        namespace_digest=DIGEST,
        mode=mode,
        job_id=job_id,
        attempt=1,
        max_attempts=max_attempts,
        ttl_s=ttl_s,
        with_backlog=with_backlog,
    )
