"""How a preprocessed item is described to the store, its requesters, and the worker that writes it. Pure."""

from triptych_common.protocol.messages import EncodeJob, EncoderCacheMetadata
from triptych_common.protocol.store import DTYPE_BYTES, Reserved, TensorSpec
from triptych_encoder.encoding import PreparedItem
from triptych_vllm_connector.step_orders import WriteOrder


def tensor_spec(prepared: PreparedItem, dtype: str) -> TensorSpec:
    """Its output: [num_embeds, width]."""
    num_bytes = prepared.num_embeds * prepared.width * DTYPE_BYTES[dtype]
    return TensorSpec.model_validate(
        {"shape": (prepared.num_embeds, prepared.width), "dtype": dtype, "num_bytes": num_bytes}
    )


def item_metadata(
    job: EncodeJob, prepared: PreparedItem, spec: TensorSpec, encoder: str, store: str
) -> EncoderCacheMetadata:
    """Not sealed yet, and for no requester yet."""
    num_embeds, width = spec.shape
    return EncoderCacheMetadata(
        job_id=job.job_id,
        mm_hash=job.mm_hash,
        modality=job.modality,
        num_embeds=num_embeds,
        width=width,
        dtype=spec.dtype,
        num_bytes=spec.num_bytes,
        record=prepared.record,
        encoder=encoder,
        store=store,
        sealed=False,
        requesters=(),
    )


def write_order(
    job: EncodeJob, traceparent: str | None, prepared: PreparedItem, spec: TensorSpec, reservation: Reserved
) -> WriteOrder:
    """Where the worker is to write it."""
    return WriteOrder(
        mm_hash=job.mm_hash,
        job_id=job.job_id,
        reservation_id=reservation.reservation_id,
        offset=reservation.offset,
        num_embeds=prepared.num_embeds,
        width=spec.shape[1],
        dtype=spec.dtype,
        traceparent=traceparent,
        generation=reservation.generation,
        memory=reservation.memory,
    )
