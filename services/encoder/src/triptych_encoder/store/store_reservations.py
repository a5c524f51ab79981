"""Reservation of one item in the store, and the encoder's pin after the seal. `JobRunner` retries a full
store."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from triptych_common.domain.errors import ItemTooLargeError, StoreError, StoreFullError
from triptych_common.protocol.messages import FailureKind
from triptych_common.protocol.store import AlreadySealed, Reserved, TensorSpec
from triptych_encoder.encoding import JobFailure
from triptych_encoder.store.store_client import StoreClient

SEAL_TIMEOUT_S = 5.0  # from the engine's answer to the store's push: a message on a local socket
SHORTEST_TIMEOUT_S = 0.02
MAX_EVICTIONS = 5  # of one item between two of our commands

Reservation = Reserved | AlreadySealed
PinFuture = asyncio.Future[int]
"""Future of the pin's id, done when the entry is sealed and pinned for this encoder."""


class StoreReservations:
    """Reserves items. Refusals become a `JobFailure`; a full store stays a `StoreFullError`."""

    def __init__(self, store_client: StoreClient, memories: Callable[[], Awaitable[list[str]]]) -> None:
        """`memories` returns where the tensor may lie, best first."""
        self._store_client = store_client
        self._memories = memories

    async def check_size(self, specs: Sequence[TensorSpec]) -> None:
        """Check the size of an item's pieces together: the store sees one at a time, and would evict in vain.

        Raises:
            JobFailure: together they are larger than the memories that they may lie in.
        """
        if not self._store_client.can_hold([spec.num_bytes for spec in specs], await self._memories()):
            raise _job_failure(ItemTooLargeError("too_large", ""))

    async def find_sealed(self, mm_hashes: Sequence[str], deadline: float) -> set[str]:
        """Hashes among these that are sealed.

        Raises:
            JobFailure: the store refuses, or does not answer until `deadline` (monotonic seconds).
        """
        try:
            return await self._store_client.find_sealed(mm_hashes, _left_s(deadline))
        except StoreError as error:
            raise _job_failure(error) from error

    async def reserve_item(
        self, mm_hash: str, spec: TensorSpec, *, is_granted: bool, deadline: float
    ) -> tuple[Reservation, PinFuture]:
        """Reserve blocks, or find the sealed entry; with a future of the pin after the seal.

        `is_granted`: a consumer keeps space for the item.

        Raises:
            StoreFullError: no space now.
            JobFailure: the store refuses, or does not answer until `deadline` (monotonic seconds).
        """
        reservation: Reservation | None = None
        pin: PinFuture | None = None
        try:
            for _ in range(MAX_EVICTIONS):
                reservation = await self._store_client.reserve_blocks(
                    mm_hash,
                    spec,
                    may_use_reserve=is_granted,
                    memories=await self._memories(),
                    timeout_s=_left_s(deadline),
                )
                if pin is not None and is_pinned(pin):  # sealed since we watch it
                    return reservation, pin
                pin = await self._store_client.watch_item(mm_hash, _left_s(deadline))
                if isinstance(reservation, Reserved) or pin.done():
                    return reservation, pin
                # The entry was evicted between the two answers, and has no writer: reserve it again.
        except (StoreError, asyncio.CancelledError) as error:
            if reservation is not None:
                self.give_back(mm_hash, reservation, pin)
            if isinstance(error, StoreFullError | asyncio.CancelledError):
                raise
            raise _job_failure(error) from error
        if reservation is not None:
            self.give_back(mm_hash, reservation, pin)
        raise JobFailure(FailureKind.STORE_FULL, "the cache store evicts the item as soon as it is sealed")

    def give_back(self, mm_hash: str, reservation: Reservation, pin: PinFuture | None) -> None:
        """End the reservation and the pin or watch of an order that the worker will never get."""
        if pin is None or not is_pinned(pin):
            self._store_client.unwatch_item(mm_hash, _reservation_id(reservation))
            return
        self._store_client.end_pins([pin.result()])
        if isinstance(reservation, Reserved):
            self._store_client.cancel_reservation(reservation.reservation_id)

    async def wait_for_pin(self, mm_hash: str, pin: PinFuture, reservation: Reservation) -> int:
        """Pin id, once the engine has answered. Raises JobFailure: the worker wrote nothing."""
        await asyncio.wait({pin}, timeout=SEAL_TIMEOUT_S)
        if is_pinned(pin):
            return pin.result()
        self._store_client.unwatch_item(mm_hash, _reservation_id(reservation))
        raise JobFailure(FailureKind.ENCODER_ERROR, "the encoder's output was not written")


def is_pinned(pin: PinFuture) -> bool:
    """True if the entry is sealed and pinned for this encoder."""
    return pin.done() and not pin.cancelled() and pin.exception() is None


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), SHORTEST_TIMEOUT_S)


def _reservation_id(reservation: Reservation) -> int | None:
    return reservation.reservation_id if isinstance(reservation, Reserved) else None


def _job_failure(error: StoreError) -> JobFailure:
    if isinstance(error, ItemTooLargeError):
        return JobFailure(FailureKind.TOO_LARGE, "the item is larger than the cache store can hold")
    return JobFailure(FailureKind.ENCODER_ERROR, f"the cache store refused: {error.code}")
