"""Reservations of one item's parts in the store, and the encoder's pins of them after the seals.

An item has one part, or as many as pieces. They are reserved together or not at all: two items that had half
of the region each would wait for each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from triptych_common.domain.transports import transport_of
from triptych_common.protocol.messages import EncodeJob, EncoderCacheMetadata, Transport
from triptych_common.protocol.store import DTYPE_BYTES, Reserved, TensorSpec
from triptych_encoder.encoding import JobFailure, PreparedItem
from triptych_encoder.store.store_client import StoreClient
from triptych_encoder.store.store_reservations import PinFuture, Reservation, StoreReservations, is_pinned
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


@dataclass
class HeldPart:
    """Reservation of one part, with what this encoder must end of it; the store has its state."""

    part: ItemPart
    reservation: Reservation
    pin: PinFuture
    was_ordered: bool = False  # our worker has got the order to write it
    is_given_up: bool = False  # the worker wrote nothing, and no seal is watched any more

    @property
    def is_sealed(self) -> bool:
        return is_pinned(self.pin)


class HeldParts:
    """Reservations of all parts of one item, in order."""

    def __init__(
        self, held: Sequence[HeldPart], reservations: StoreReservations, store_client: StoreClient
    ) -> None:
        self._held = held
        self._reservations = reservations
        self._store_client = store_client

    def __iter__(self) -> Iterator[HeldPart]:
        return iter(self._held)

    @property
    def is_sealed(self) -> bool:
        """True if all parts are sealed."""
        return all(each.is_sealed for each in self._held)

    @property
    def transport(self) -> Transport:
        """Transport of the first part."""
        return transport_of(self._held[0].reservation.memory)

    def give_back(self) -> None:
        """Give everything back for an item that fails, except reservations that the worker has."""
        give_back_parts(self._held, self._reservations, self._store_client)

    async def wait_for_pins(self) -> list[int]:
        """Pin ids of all parts, once the engine has answered for them.

        Raises:
            JobFailure: the worker did not write one of them.
        """
        for each in self._held:
            if isinstance(each.reservation, Reserved) and not each.was_ordered:  # another encoder sealed it
                self._store_client.cancel_reservation(each.reservation.reservation_id)
        return [await self._wait_for_pin(each) for each in self._held]

    async def _wait_for_pin(self, held: HeldPart) -> int:
        try:
            return await self._reservations.wait_for_pin(held.part.mm_hash, held.pin, held.reservation)
        except JobFailure:
            held.is_given_up = True
            raise


async def hold_parts(
    parts: Sequence[ItemPart],
    reservations: StoreReservations,
    store_client: StoreClient,
    *,
    is_granted: bool,
    deadline: float,
) -> HeldParts:
    """Reserve all parts; see `StoreReservations.reserve_item`.

    Sealed pieces are pinned first: otherwise the store might evict them to make room for the others.

    Raises:
        StoreFullError: no space for all of them now; nothing is held.
        JobFailure: the store refuses, or does not answer; nothing is held.
    """
    in_order, mm_hashes = parts, [part.mm_hash for part in parts]
    if len(parts) > 1:
        sealed = await reservations.find_sealed(mm_hashes, deadline)
        if len(sealed) < len(parts):
            await reservations.check_size([part.spec for part in parts])
        in_order = sorted(parts, key=lambda part: part.mm_hash not in sealed)
    held: list[HeldPart] = []
    try:
        for part in in_order:
            reservation, pin = await reservations.reserve_item(
                part.mm_hash, part.spec, is_granted=is_granted, deadline=deadline
            )
            held.append(HeldPart(part, reservation, pin))
    except BaseException:
        give_back_parts(held, reservations, store_client)
        raise
    held.sort(key=lambda each: mm_hashes.index(each.part.mm_hash))
    return HeldParts(held, reservations, store_client)


def give_back_parts(
    held: Sequence[HeldPart], reservations: StoreReservations, store_client: StoreClient
) -> None:
    for each in held:
        if not each.was_ordered:
            reservations.give_back(each.part.mm_hash, each.reservation, each.pin)
        elif each.is_sealed:
            store_client.end_pins([each.pin.result()])
        elif not each.is_given_up:
            store_client.unwatch_item(each.part.mm_hash, None)
