"""A place in the store for an item that will be encoded, and our pin of it once it is there."""

import asyncio
from collections.abc import Awaitable, Callable

from triptych_common.domain.errors import ItemTooLargeError, StoreError, StoreFullError
from triptych_common.protocol.messages import FailureKind
from triptych_common.protocol.store import SHM, AlreadySealed, Reserved, TensorSpec
from triptych_encoder.engine.encoding import JobFailure
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.store.store_client import StoreClient

SEAL_TIMEOUT_S = 5.0  # from the engine's answer to the store's push: a message on a local socket
MAX_RESERVE_ATTEMPTS = 5


class StoreReservations:
    """What the store refuses becomes a `JobFailure`."""

    def __init__(
        self,
        hand_over: StoreClient,
        ledger: Ledger,
        memories: Callable[[], Awaitable[list[str]]] | None,
    ) -> None:
        self._hand_over = hand_over
        self._ledger = ledger
        self._memories = memories

    async def reserve(
        self, mm_hash: str, spec: TensorSpec, on_full: Callable[[], Awaitable[None]], timeout_s: float
    ) -> tuple[Reserved | AlreadySealed, "asyncio.Future[int]"]:
        """Blocks to write, or an entry that is there; and our pin of it, once it is sealed."""
        for attempt in range(MAX_RESERVE_ATTEMPTS):
            try:
                reservation = await self._reserve(mm_hash, spec, on_full, timeout_s)
            except JobFailure:
                if attempt:  # the watch of the round before
                    self._hand_over.give_up(mm_hash, None)
                raise
            sealed = await self._watch(mm_hash, reservation, timeout_s)
            if isinstance(reservation, Reserved) or sealed.done():
                return reservation, sealed
            # It was evicted between the two answers, and nobody writes it: that is for us now.
        self._hand_over.give_up(mm_hash, None)
        raise JobFailure(FailureKind.STORE_FULL, "the cache store evicts the item as soon as it is sealed")

    async def _reserve(
        self, mm_hash: str, spec: TensorSpec, on_full: Callable[[], Awaitable[None]], timeout_s: float
    ) -> Reserved | AlreadySealed:
        try:
            return await self._hand_over.reserve(
                mm_hash,
                spec,
                lambda: self._ledger.is_granted(mm_hash),
                on_full,
                timeout_s,
                [SHM] if self._memories is None else await self._memories(),
            )
        except StoreFullError as error:
            raise JobFailure(FailureKind.STORE_FULL, "the cache store has no space") from error
        except ItemTooLargeError as error:
            raise JobFailure(
                FailureKind.TOO_LARGE, "the item is larger than the cache store can hold"
            ) from error
        except StoreError as error:
            raise JobFailure(FailureKind.ENCODER_ERROR, f"the cache store refused: {error.code}") from error

    async def _watch(
        self, mm_hash: str, reservation: Reserved | AlreadySealed, timeout_s: float
    ) -> "asyncio.Future[int]":
        try:
            return await self._hand_over.watch(mm_hash, timeout_s)
        except StoreError as error:
            self._hand_over.give_up(mm_hash, _reservation_id(reservation))
            raise JobFailure(FailureKind.ENCODER_ERROR, f"the cache store refused: {error.code}") from error

    async def sealed_pin(
        self, mm_hash: str, sealed: "asyncio.Future[int]", reservation: Reserved | AlreadySealed
    ) -> int:
        """Our pin, when the engine has answered."""
        await asyncio.wait({sealed}, timeout=SEAL_TIMEOUT_S)
        if is_here(sealed):
            return sealed.result()
        self._hand_over.give_up(mm_hash, _reservation_id(reservation))
        raise JobFailure(FailureKind.ENCODER_ERROR, "the encoder's output was not written")


def is_here(sealed: "asyncio.Future[int]") -> bool:
    """Is the entry sealed, and pinned for us?"""
    return sealed.done() and not sealed.cancelled() and sealed.exception() is None


def _reservation_id(reservation: Reserved | AlreadySealed) -> int | None:
    return reservation.reservation_id if isinstance(reservation, Reserved) else None
