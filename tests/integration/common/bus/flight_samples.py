"""One job of one flight, as the tests of flights send it, and who asks for its item."""

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
    placeholder_metadata={},
    encoder="e",
    store="s",
    sealed=True,
    requesters=(),
)
