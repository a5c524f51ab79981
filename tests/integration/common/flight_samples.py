"""One job of one flight, as the tests of flights send it, and the requesters of its item."""

from tests.support.item_records import item_record
from triptych_common.coordination import FlightClaim, SingleFlight
from triptych_common.coordination.single_flight import ClaimMode
from triptych_common.protocol.messages import EncodeJob, EncoderCacheMetadata, Modality, Requester

HASH = "a" * 64
DIGEST = "d" * 64


def requester_at(gateway: str) -> Requester:
    return Requester(request_id=f"of-{gateway}", item_index=0, gateway=gateway, prefill_decode="pd-0")


def job_for(requester: Requester) -> EncodeJob:
    return EncodeJob(
        job_id="job-1",
        mm_hash=HASH,
        modality=Modality.IMAGE,
        media_num_bytes=1,
        requesters=(requester,),
        namespace_digest=DIGEST,
    )


METADATA = EncoderCacheMetadata(
    job_id="job-1",
    mm_hash=HASH,
    modality=Modality.IMAGE,
    num_embeds=1,
    width=1,
    dtype="float32",
    num_bytes=4,
    record=item_record(1),
    encoder="e",
    store="s",
    sealed=True,
    requesters=(),
)


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
