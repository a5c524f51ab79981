"""One item's reservation in the store, and our pin of it after the seal. `JobRunner` retries a full store."""

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
"""Of the id of our pin: done when the entry is sealed and pinned for us."""


class StoreReservations:
    """What the store refuses becomes a `JobFailure`; a full store stays a `StoreFullError`."""

    def __init__(self, store_client: StoreClient, memories: Callable[[], Awaitable[list[str]]]) -> None:
        """`memories`: where the tensor may lie, best first."""
        self._store_client = store_client
        self._memories = memories

    async def check_size(self, specs: Sequence[TensorSpec]) -> None:
        """Of an item's pieces. The store sees one at a time, and would evict all else for what never fits.

        Raises:
            JobFailure: together they are larger than the memories that they may lie in.
        """
        if not self._store_client.can_hold([spec.num_bytes for spec in specs], await self._memories()):
            raise _job_failure(ItemTooLargeError("too_large", ""))

    async def find_sealed(self, mm_hashes: Sequence[str], deadline: float) -> set[str]:
        """Those of them that are there.

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
        """Blocks to write, or an entry that is there; and our pin of it, once it is sealed.

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
        """Our worker has not got the order, and never will: end the reservation, and our pin or our watch."""
        if pin is None or not is_pinned(pin):
            self._store_client.unwatch_item(mm_hash, _reservation_id(reservation))
            return
        self._store_client.end_pins([pin.result()])
        if isinstance(reservation, Reserved):
            self._store_client.cancel_reservation(reservation.reservation_id)

    async def wait_for_pin(self, mm_hash: str, pin: PinFuture, reservation: Reservation) -> int:
        """Our pin, when the engine has answered.

        Raises:
            JobFailure: the worker wrote nothing.
        """
        await asyncio.wait({pin}, timeout=SEAL_TIMEOUT_S)
        if is_pinned(pin):
            return pin.result()
        self._store_client.unwatch_item(mm_hash, _reservation_id(reservation))
        raise JobFailure(FailureKind.ENCODER_ERROR, "the encoder's output was not written")


def is_pinned(pin: PinFuture) -> bool:
    """Whether the entry is sealed, and pinned for us."""
    return pin.done() and not pin.cancelled() and pin.exception() is None


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), SHORTEST_TIMEOUT_S)


def _reservation_id(reservation: Reservation) -> int | None:
    return reservation.reservation_id if isinstance(reservation, Reserved) else None


def _job_failure(error: StoreError) -> JobFailure:
    if isinstance(error, ItemTooLargeError):
        return JobFailure(FailureKind.TOO_LARGE, "the item is larger than the cache store can hold")
    return JobFailure(FailureKind.ENCODER_ERROR, f"the cache store refused: {error.code}")
