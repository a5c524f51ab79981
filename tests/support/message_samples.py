"""Messages and records of the registry, of which a test gives what it is about."""

from typing import Any

from tests.support.item_records import item_record
from triptych_common.protocol.messages import (
    EncodeJob,
    EncoderCacheMetadata,
    InstanceRecord,
    Modality,
    Requester,
    Role,
)


def instance_record(name: str, role: Role, **fields: Any) -> InstanceRecord:
    return InstanceRecord(instance=name, role=role, **{"boot_id": "b"} | fields)


def encode_job(*requesters: Requester, **fields: Any) -> EncodeJob:
    """One of an image, for `requesters`."""
    values = {
        "job_id": "job-1", "mm_hash": "a" * 64, "modality": Modality.IMAGE, "media_num_bytes": 1,
        "namespace_digest": "d" * 64,
    }  # fmt: skip
    return EncodeJob(**{**values, "requesters": requesters, **fields})


def cache_metadata(
    *requesters: Requester, num_embeds: int = 1, pieces: tuple[int, ...] = (), **fields: Any
) -> EncoderCacheMetadata:
    """Metadata of an image with rows of 16 bytes, for `requesters`."""
    values = {
        "job_id": "job-1", "mm_hash": "a" * 64, "modality": Modality.IMAGE, "width": 4, "dtype": "float32",
        "num_bytes": 16 * num_embeds, "encoder": "encoder-0", "store": "store-0", "sealed": False,
    }  # fmt: skip
    if "record" not in fields:
        fields["record"] = item_record(num_embeds).model_copy(update={"pieces": pieces})
    return EncoderCacheMetadata(**{**values, "num_embeds": num_embeds, "requesters": requesters, **fields})
