"""Connection to one target's agent as the event loop sees it: offers and their results."""

import asyncio
import itertools
import time
from collections.abc import Callable

from triptych_cache_store.fabric.source.byte_turns import RateLimit
from triptych_cache_store.fabric.source.outbox import EntryOutbox
from triptych_cache_store.fabric.source.region_writes import RegionWrites
from triptych_cache_store.fabric.wire.channel import ChannelError, FabricChannel
from triptych_cache_store.fabric.wire.connection import FabricConnection
from triptych_cache_store.fabric.wire.frames import FrameKind, Offer, OfferFailed, json_frame
from triptych_cache_store.fabric.wire.handshake import LinkRefusedError
from triptych_common.domain.errors import MalformedMessageError, TriptychError
from triptych_common.protocol.messages import EncodeClass, FabricTransport
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_OFFERS = 512  # at once on a link; more wait for their turn


class PushFailedError(TriptychError):
    """The entry cannot reach the target from here."""

    def __init__(self, kind: TransferFailureKind, detail: str) -> None:
        super().__init__(f"{kind.value}: {detail}")
        self.kind = kind
        self.detail = detail


class LinkedOffer:
    """An offer that was sent; `answered` is False if the target had the entry already."""

    def __init__(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.answered: asyncio.Future[bool] = loop.create_future()
        self.sent: asyncio.Future[None] = loop.create_future()  # its last byte is with the kernel
        self.stored: asyncio.Future[None] = loop.create_future()
        self.began_at: float | None = None  # monotonic second of its first byte

    def fail(self, error: PushFailedError) -> None:
        for future in (self.answered, self.sent, self.stored):
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: perhaps nobody waits for this one


class TargetLink:
    """One connection to the agent of the store `target`; `opened` fails if it cannot be established."""

    def __init__(
        self,
        target: str,
        transport: FabricTransport,
        channel: FabricChannel,
        greet: Callable[[FabricChannel], None],
        rate: RateLimit,
        progress_timeout_s: float,
        on_closed: Callable[["TargetLink"], None],
        open_writes: Callable[[], RegionWrites] | None = None,
    ) -> None:
        """`open_writes` opens NIXL's writes, for links by NIXL."""
        loop = asyncio.get_running_loop()
        self.target = target
        self.transport = transport
        self.opened: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.is_open = False
        self.is_lost = False  # once it is closed: neither ended here nor refused
        self._is_retired = False
        self._numbers = itertools.count(1)
        self._offers: dict[int, LinkedOffer] = {}
        self._going: dict[int, Callable[[], None]] = {}  # withdrawn, but perhaps a chunk is being sent
        self._room = asyncio.Semaphore(MAX_OFFERS)
        self._on_closed = on_closed
        self._outbox = EntryOutbox(greet, self, rate, loop, open_writes)
        self._connection = FabricConnection(
            f"fabric to {target}"[:60], channel, self._outbox, progress_timeout_s
        )
        self._connection.start()

    @property
    def num_offers(self) -> int:
        return len(self._offers)

    # ---- by pushes -------------------------------------------------------------------------------
    async def offer(self, offer: Offer) -> LinkedOffer:
        """Send the offer; the caller must `withdraw` it in every case.

        Raises:
            PushFailedError: the link has ended.
        """
        await self._room.acquire()
        if self.closed.done():
            self._room.release()
            raise PushFailedError(TransferFailureKind.UNREACHABLE, "the link has ended")
        linked = LinkedOffer(next(self._numbers))
        self._offers[linked.number] = linked
        frame = json_frame(FrameKind.OFFER, linked.number, offer)
        self._connection.post(lambda: self._outbox.offer(linked.number, frame))
        return linked

    def send(self, linked: LinkedOffer, view: memoryview, encode_class: EncodeClass) -> None:
        """Send the entry's bytes; `view` must stay valid until `withdraw` calls `on_gone`."""
        self._connection.post(lambda: self._outbox.send(linked.number, view, encode_class))

    def change_class(self, linked: LinkedOffer, encode_class: EncodeClass) -> None:
        self._connection.post(lambda: self._outbox.change_class(linked.number, encode_class))

    def withdraw(self, linked: LinkedOffer, on_gone: Callable[[], None]) -> None:
        """End the offer; `on_gone` is called when its bytes are no longer read."""
        if self._offers.pop(linked.number, None) is not None:
            self._room.release()
        if self.closed.done():
            on_gone()
            return
        self._going[linked.number] = on_gone
        self._connection.post(
            lambda: self._outbox.withdraw(linked.number, lambda: self._on_gone(linked.number))
        )
        self._close_if_idle()

    def close_when_idle(self) -> None:
        """Close after the last offer, because another link replaces this one."""
        self._is_retired = True
        self._close_if_idle()

    def close(self) -> None:
        """Close the connection; `closed` resolves later."""
        self._connection.stop()

    def _close_if_idle(self) -> None:
        if self._is_retired and not self._offers:
            self.close()

    # ---- events of its thread --------------------------------------------------------------------
    def on_open(self) -> None:
        self.is_open = True
        if not self.opened.done():
            self.opened.set_result(None)
        log.info("fabric link is up", target=self.target, transport=self.transport.value)

    def on_answer(self, number: int, kind: FrameKind, failure: OfferFailed | None) -> None:
        linked = self._offers.get(number)
        if linked is None:
            return
        if failure is not None:
            linked.fail(PushFailedError(failure.kind, failure.detail))
        elif kind is FrameKind.STORED:
            _resolve(linked.stored)
        elif not linked.answered.done():
            linked.answered.set_result(kind is FrameKind.ACCEPTED)

    def on_began(self, number: int) -> None:
        if (linked := self._offers.get(number)) is not None:
            linked.began_at = time.monotonic()

    def on_bytes_sent(self, number: int) -> None:
        if (linked := self._offers.get(number)) is not None:
            _resolve(linked.sent)

    def _on_gone(self, number: int) -> None:
        if (on_gone := self._going.pop(number, None)) is not None:
            on_gone()

    def on_closed(self, error: TriptychError | None) -> None:
        was_open, self.is_open = self.is_open, False
        detail = str(error) if error is not None else "the link was closed"
        if not self.opened.done():
            self.opened.set_exception(error or ChannelError(detail))
            self.opened.exception()
        kind = TransferFailureKind.UNREACHABLE
        if isinstance(error, LinkRefusedError | MalformedMessageError):
            kind = TransferFailureKind.REFUSED
        for linked in list(self._offers.values()):
            linked.fail(PushFailedError(kind, detail))
        if was_open and error is not None:
            log.warning("fabric link lost", target=self.target, error=detail)
        self._connection.join(1.0)  # this was the last it did
        self.closed.set_result(None)
        for number in list(self._going):
            self._on_gone(number)
        self.is_lost = error is not None and not isinstance(error, LinkRefusedError)
        self._on_closed(self)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
