"""Reception of one entry from another agent into the agent's own store.

The offer waits for its part of the budget, and for room in the store. Then its blocks are held: this agent
is their writer, and a watcher finds the entry being written. Once its bytes have come and are right, it is
sealed. An offer that is withdrawn, or fails, gives its blocks back when nothing writes to them any more.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from triptych_common.domain.errors import ItemTooLargeError, SpecMismatchError, StoreError, StoreFullError
from triptych_common.domain.fair_queue import LEVELS
from triptych_common.protocol.messages import EncodeClass
from triptych_common.protocol.store import AlreadySealed, Reserved
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_common.region.fence import check_reservation
from triptych_common.telemetry.logs import get_logger
from triptych_fabric.local_store import LocalStore
from triptych_fabric.transports.transport import Sink
from triptych_fabric.wire.connection import resolve
from triptych_fabric.wire.frames import MAX_DETAIL_CHARS, EntryFailedError, FrameKind, Offer, OfferFailed

log = get_logger(__name__)

FIRST_RETRY_S = 0.005
LAST_RETRY_S = 0.25
UNSEALED_SHARE = 0.75


@dataclass(order=True)
class _Claim:
    level: int
    order: int
    num_bytes: int = field(compare=False)
    is_sealed: bool = field(compare=False)
    granted: "asyncio.Future[None]" = field(compare=False)


class ByteBudget:
    """Budget of `max_bytes` reserved for other agents' entries and not yet sealed, for one event loop.

    An offer is `ACCEPTED` when it gets its part; the sender sends nothing before. More urgent classes come
    first, then earlier offers. Entries not yet sealed at their sender may take three quarters, so that
    entries ready to be sent do not wait for encoders. An entry larger than the budget may take all of it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._claims: list[_Claim] = []
        self._orders = itertools.count()
        self.num_bytes = 0

    @asynccontextmanager
    async def hold(
        self, num_bytes: int, encode_class: EncodeClass, *, is_sealed: bool
    ) -> AsyncIterator[None]:
        """Hold `num_bytes` of the budget during the body, after waiting for them."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        claim = _Claim(LEVELS[encode_class], next(self._orders), num_bytes, is_sealed, granted)
        self._claims.append(claim)
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self.num_bytes -= num_bytes
            else:
                self._claims.remove(claim)
            self._grant()

    def _grant(self) -> None:
        for claim in sorted(self._claims):
            if claim.granted.done():  # cancelled: its owner is about to remove it
                continue
            limit = self._max_bytes * (1.0 if claim.is_sealed else UNSEALED_SHARE)
            if self.num_bytes and self.num_bytes + claim.num_bytes > limit:
                if claim.is_sealed:
                    return  # it is the next one; what comes after it does not pass it
                continue
            self.num_bytes += claim.num_bytes
            self._claims.remove(claim)
            claim.granted.set_result(None)


class OfferChannel(Protocol):
    def accept(self, number: int, sink: Sink) -> None: ...

    def answer(self, number: int, kind: FrameKind) -> None: ...

    async def drop(self, number: int, failure: OfferFailed) -> None:
        """Send the failure; returns when nothing is written for the offer any more."""


class Reception:
    """Reception of one offer; `run` is called once."""

    def __init__(
        self, number: int, offer: Offer, store: LocalStore, budget: ByteBudget, channel: OfferChannel
    ) -> None:
        self.number = number
        self.offer = offer
        self.deadline = time.monotonic() + offer.remaining_ms / 1000
        self._store = store
        self._budget = budget
        self._channel = channel
        self._held: Reserved | None = None
        self._received: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._withdrawn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # ---- events ----------------------------------------------------------------------------------
    def on_received(self, is_intact: bool) -> None:
        if not self._received.done():
            self._received.set_result(is_intact)

    def on_withdrawn(self) -> None:
        resolve(self._withdrawn)

    # ---- its life --------------------------------------------------------------------------------
    async def run(self) -> str:
        """Run to the result: sealed, present, withdrawn, or a `TransferFailureKind`."""
        async with AsyncExitStack() as budget:  # until its blocks are free again
            return await self._run(budget)

    async def _run(self, budget: AsyncExitStack) -> str:
        storing = self._store_entry(budget)
        work = asyncio.get_running_loop().create_task(storing, name=f"receive {self.number}")
        try:
            waits: list[asyncio.Future[Any]] = [work, self._withdrawn]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            await asyncio.wait([work])
        try:
            answer = work.result()
        except asyncio.CancelledError:
            await self._give_back(TransferFailureKind.UNREACHABLE, "withdrawn")
            return "withdrawn"
        except EntryFailedError as refused:
            kind, detail = refused.kind, refused.detail
        except TimeoutError:
            kind, detail = TransferFailureKind.EXPIRED, "the offer's deadline has passed"
        except StoreError as error:
            kind, detail = TransferFailureKind.UNREACHABLE, f"the target's store: {error}"
        except Exception:
            log.exception("fabric offer failed", mm_hash=self.offer.mm_hash)
            kind, detail = TransferFailureKind.UNREACHABLE, "a fault of the target's agent"
        else:
            self._channel.answer(self.number, answer)
            return "present" if answer is FrameKind.PRESENT else "sealed"
        await self._give_back(kind, detail)
        return kind.value

    async def _store_entry(self, budget: AsyncExitStack) -> FrameKind:
        """Receive until the store has the entry.

        May be cancelled anywhere; `_held` and `budget` are then still held.
        """
        offer, spec = self.offer, self.offer.spec
        if spec.num_bytes > self._store.mapping.num_bytes:  # before others wait behind it
            raise EntryFailedError(TransferFailureKind.REFUSED, "more bytes than the target's store has")
        async with asyncio.timeout(max(0.0, self.deadline - time.monotonic())):
            await budget.enter_async_context(
                self._budget.hold(spec.num_bytes, offer.encode_class, is_sealed=offer.is_sealed)
            )
            reply = await self._reserve()
            if isinstance(reply, AlreadySealed):
                return FrameKind.PRESENT
            self._held = reply
            await self._receive(reply)
            return FrameKind.STORED

    async def _reserve(self) -> Reserved | AlreadySealed:
        retry_s = FIRST_RETRY_S
        while True:
            try:
                return await self._store.reserve(self.offer.mm_hash, self.offer.spec)
            except StoreFullError as error:
                if time.monotonic() + retry_s >= self.deadline:
                    raise EntryFailedError(
                        TransferFailureKind.TARGET_FULL, "the target's store had no room in time"
                    ) from error
            except (ItemTooLargeError, SpecMismatchError) as error:
                raise EntryFailedError(TransferFailureKind.REFUSED, str(error)) from error
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _receive(self, reserved: Reserved) -> None:
        offer, store = self.offer, self._store
        view = store.mapping.view(reserved.offset, offer.spec.num_bytes)
        sink = Sink(offer.mm_hash, reserved.generation, reserved.offset, view)
        check_reservation(store.mapping, sink, len(view))
        self._channel.accept(self.number, sink)
        is_intact = await asyncio.shield(self._received)
        if not is_intact:
            raise EntryFailedError(TransferFailureKind.CORRUPTED, "what came is not what was sent")
        await store.seal(reserved.reservation_id)

    async def _give_back(self, kind: TransferFailureKind, detail: str) -> None:
        """Cancel the reservation once nothing writes to its blocks any more."""
        await self._channel.drop(self.number, OfferFailed(kind=kind, detail=detail[:MAX_DETAIL_CHARS]))
        if self._held is not None:
            self._store.cancel(self._held.reservation_id)
