"""Descriptions of a preprocessed item for the store, its requesters, and the worker that writes it. Pure."""

from dataclasses import dataclass

from triptych_common.protocol.messages import EncodeJob, EncoderCacheMetadata
from triptych_common.protocol.store import DTYPE_BYTES, Reserved, TensorSpec
from triptych_encoder.encoding import PreparedItem
from triptych_vllm_connector.pieces import piece_hashes
from triptych_vllm_connector.step_orders import WriteOrder


@dataclass(frozen=True)
class ItemPart:
    """Part of an item that is one tensor in the store and one encode: the item, or a piece of it."""

    mm_hash: str
    engine_request_id: str
    prepared: PreparedItem
    spec: TensorSpec


def parts_of(job: EncodeJob, prepared: PreparedItem, dtype: str) -> list[ItemPart]:
    """Parts of the item, in the order of its rows."""
    if not prepared.pieces:
        return [ItemPart(job.mm_hash, job.job_id, prepared, tensor_spec(prepared, dtype))]
    hashes = piece_hashes(job.mm_hash, prepared.record.pieces)
    return [
        ItemPart(mm_hash, f"{job.job_id}.{number}", piece, tensor_spec(piece, dtype))
        for number, (mm_hash, piece) in enumerate(zip(hashes, prepared.pieces, strict=True))
    ]


def tensor_spec(prepared: PreparedItem, dtype: str) -> TensorSpec:
    """Shape and dtype of the item's output: [num_embeds, width]."""
    num_bytes = prepared.num_embeds * prepared.width * DTYPE_BYTES[dtype]
    return TensorSpec.model_validate(
        {"shape": (prepared.num_embeds, prepared.width), "dtype": dtype, "num_bytes": num_bytes}
    )


def item_metadata(
    job: EncodeJob, prepared: PreparedItem, spec: TensorSpec, encoder: str, store: str
) -> EncoderCacheMetadata:
    """Metadata of an item that is not sealed yet, without requesters."""
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


def write_order(part: ItemPart, traceparent: str | None, reservation: Reserved) -> WriteOrder:
    """Order for the worker to write a part into its reservation."""
    num_embeds, width = part.spec.shape
    return WriteOrder(
        mm_hash=part.mm_hash,
        job_id=part.engine_request_id,
        reservation_id=reservation.reservation_id,
        offset=reservation.offset,
        num_embeds=num_embeds,
        width=width,
        dtype=part.spec.dtype,
        traceparent=traceparent,
        generation=reservation.generation,
        memory=reservation.memory,
    )
