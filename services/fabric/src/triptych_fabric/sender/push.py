"""Push of one entry from the agent's own store to the receiver's.

The entry is pinned, or watched while an encoder writes it. The receiver's agent is offered its shape and
size; the bytes wait for the answer and for the seal, and are sent in fair order with those of other entries.
The push ends when the receiver has checked and sealed, or had the entry already.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any, TypeVar

from triptych_common.domain.errors import StoreError
from triptych_common.protocol.messages import EncodeClass, FabricTransport
from triptych_common.protocol.store import SHM, Descriptor, TensorSpec
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_common.region.fence import check_descriptor
from triptych_fabric.local_store import EntryHold, LocalStore
from triptych_fabric.sender.link import LinkedOffer, OutgoingLink
from triptych_fabric.sender.links import OutgoingLinks
from triptych_fabric.wire.frames import MAX_OFFER_MS, EntryFailedError, Offer

Value = TypeVar("Value")


@dataclass(frozen=True)
class Pushed:
    num_bytes: int  # that crossed the network; 0: the receiver had the entry
    began_at: float  # monotonic seconds
    ended_at: float
    transport: FabricTransport


class EntryPush:
    """Push of one entry to one receiver; `run` is called once."""

    def __init__(
        self, mm_hash: str, receiver: str, store: LocalStore, links: OutgoingLinks, encode_class: EncodeClass
    ) -> None:
        self.mm_hash = mm_hash
        self._receiver = receiver
        self._store = store
        self._links = links
        self._encode_class = encode_class
        self._link: OutgoingLink | None = None
        self._offer: LinkedOffer | None = None

    @property
    def has_lost_link(self) -> bool:
        """True if the link that carried the push has ended."""
        return self._link is not None and self._link.closed.done()

    def raise_class(self, encode_class: EncodeClass) -> None:
        """Raise the urgency, because a more urgent order needs the entry too."""
        self._encode_class = encode_class
        if self._link is not None and self._offer is not None:
            self._link.change_class(self._offer, encode_class)

    async def run(self, deadline: float, traceparent: str | None) -> Pushed:
        """Push until the receiver has the entry, by the monotonic `deadline`; raises EntryFailedError."""
        hold = self._store.hold(self.mm_hash)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await self._push(hold, deadline, traceparent)
        except TimeoutError:
            detail = "the deadline of the order has passed"
            raise EntryFailedError(TransferFailureKind.EXPIRED, detail) from None
        except StoreError as error:
            raise EntryFailedError(TransferFailureKind.ABSENT, f"the source's store: {error}") from error
        finally:
            if self._link is not None and self._offer is not None:
                self._link.withdraw(self._offer, lambda: self._store.release(hold))
            else:
                self._store.release(hold)

    async def _push(self, hold: EntryHold, deadline: float, traceparent: str | None) -> Pushed:
        await asyncio.shield(hold.answered)
        if hold.sealed.done():
            hold.sealed.result()  # raises if the entry is gone
        await self._links.connected(self._receiver)  # while it is being encoded
        spec = await self._spec(hold)
        link = self._link = await self._links.connected(self._receiver)
        offer = self._offer = await link.offer(
            Offer(
                mm_hash=self.mm_hash,
                spec=spec,
                is_sealed=hold.sealed.done(),
                encode_class=self._encode_class,
                remaining_ms=min(MAX_OFFER_MS, max(1, int((deadline - time.monotonic()) * 1000))),
                traceparent=traceparent,
            )
        )
        is_wanted = await _unless_failed(offer.answered, hold.sealed)
        if not is_wanted:
            now = time.monotonic()
            return Pushed(0, now, now, link.transport)
        descriptor = await _unless_failed(hold.sealed, offer.stored)
        self._check(descriptor, spec)
        view = self._store.mapping.view(descriptor.offset, spec.num_bytes)
        link.send(offer, view, self._encode_class)
        await asyncio.shield(offer.stored)
        now = time.monotonic()
        return Pushed(spec.num_bytes, offer.began_at or now, now, link.transport)

    async def _spec(self, hold: EntryHold) -> TensorSpec:
        if not hold.sealed.done():
            spec = await self._store.find_spec(self.mm_hash)
            if spec is not None:
                return spec
        return (await asyncio.shield(hold.sealed)).spec

    def _check(self, descriptor: Descriptor, spec: TensorSpec) -> None:
        if descriptor.memory != SHM:
            raise EntryFailedError(TransferFailureKind.REFUSED, "the entry is not in the memory of the host")
        if descriptor.spec != spec:
            raise EntryFailedError(TransferFailureKind.WRITER_LOST, "it is another entry than was offered")
        check_descriptor(self._store.mapping, descriptor)


async def _unless_failed(
    wanted: "asyncio.Future[Value]", other: "asyncio.Future[Descriptor] | asyncio.Future[None]"
) -> Value:
    """Result of `wanted`, or the error of `other` if that fails first."""
    futures: set[asyncio.Future[Any]] = {wanted, other}
    while not wanted.done():
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        futures -= done
        if other in done:
            other.result()
    return wanted.result()
