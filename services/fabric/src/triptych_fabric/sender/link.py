"""Connection to one receiver's agent: offers and their results, in the event loop and in its thread."""

import asyncio
import itertools
import time
from collections.abc import Callable
from functools import partial

from triptych_common.domain.errors import MalformedMessageError, TriptychError
from triptych_common.protocol.messages import EncodeClass
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_common.telemetry.logs import get_logger
from triptych_fabric.transports.transport import ChunkQueue, RateLimit, Transport
from triptych_fabric.wire.channel import ChannelError, FabricChannel
from triptych_fabric.wire.connection import ConnectionSide, FabricConnection, resolve
from triptych_fabric.wire.frames import (
    NOTHING,
    EntryFailedError,
    Frame,
    FrameHeader,
    FrameKind,
    Offer,
    OfferFailed,
    json_frame,
    read_body,
    short_frame,
)
from triptych_fabric.wire.handshake import LinkRefusedError

log = get_logger(__name__)

_AFTER_OFFER = frozenset({FrameKind.ACCEPTED, FrameKind.PRESENT, FrameKind.FAILED})
_AFTER_ACCEPTED = frozenset({FrameKind.FAILED})
_AFTER_END = frozenset({FrameKind.STORED, FrameKind.FAILED})
MAX_OFFERS = 512  # at once on a link; more wait for a slot


class LinkedOffer:
    """An offer that was sent; `answered` is False if the receiver had the entry already."""

    def __init__(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.answered: asyncio.Future[bool] = loop.create_future()
        self.stored: asyncio.Future[None] = loop.create_future()
        self.began_at: float | None = None  # monotonic second of its first byte

    def fail(self, error: EntryFailedError) -> None:
        for future in (self.answered, self.stored):
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: perhaps no push waits for this one


class EntryOutbox(ConnectionSide):
    """Sending side of a connection, in its thread: sends offers and entries, and reads answers.

    The event loop posts the methods of the first part as steps; answers go back to it as events.
    """

    def __init__(
        self,
        greet: Callable[[FabricChannel], None],
        events: "OutgoingLink",
        rate: RateLimit,
        loop: asyncio.AbstractEventLoop,
        transport: Transport,
    ) -> None:
        super().__init__(loop)
        self.chunks = ChunkQueue(rate, partial(self._tell, events.on_began))
        self._end = transport.sender_end(self)
        self.allowed = self._end.allowed
        self._greet = greet
        self._events = events
        self._expected: dict[int, frozenset[FrameKind]] = {}  # answers, by offer

    # ---- steps -----------------------------------------------------------------------------------
    def offer(self, number: int, frame: bytes) -> None:
        self._last_number = number
        self._expected[number] = _AFTER_OFFER
        self._frames.append(frame)

    def send(self, number: int, view: memoryview, encode_class: EncodeClass) -> None:
        """Send an accepted, sealed entry; `view` must stay valid until it is sent or withdrawn."""
        if number in self._expected:
            self.chunks.add(number, view, encode_class)

    def withdraw(self, number: int, on_gone: Callable[[], None]) -> None:
        """Stop sending; `on_gone` is called in the event loop when the bytes are no longer read."""
        if self._expected.pop(number, None) is not None:
            self._cancel(number)
        self.chunks.remove(number)
        self._end.when_unread(number, partial(self._tell, on_gone))

    # ---- for the transport -----------------------------------------------------------------------
    def post_frame(self, frame: bytes) -> None:
        self._frames.append(frame)

    def end_entry(self, number: int, body: bytes) -> None:
        """See `SenderLink.end_entry`; no effect if the offer has ended."""
        if number in self.chunks:
            self.chunks.remove(number)
            self._expected[number] = _AFTER_END
            self._frames.append(short_frame(FrameKind.END, number, body))

    # ---- the connection's side -------------------------------------------------------------------
    def begin(self, channel: FabricChannel) -> None:
        self._greet(channel)
        if self._end.open():
            self._tell(self._events.on_open)

    def on_header(self, header: FrameHeader) -> None:
        if header.number > self._last_number:
            raise MalformedMessageError("an answer to an offer that was not made")

    def on_frame(self, header: FrameHeader, body: bytes) -> None:
        number, kind = header.number, header.kind
        if kind is FrameKind.REGION:
            self._end.on_region(body)
            self._tell(self._events.on_open)
            return
        expected = self._expected.get(number)
        if expected is None:  # withdrawn meanwhile
            return
        if kind not in expected:
            raise MalformedMessageError(f"{kind.name} is no answer now")
        failure = read_body(OfferFailed, body) if kind is FrameKind.FAILED else None
        if kind is FrameKind.ACCEPTED:
            self._expected[number] = _AFTER_ACCEPTED
            self._end.on_accepted(number, body)
        else:
            if self._end.owes_end(number):
                self._cancel(number)
            del self._expected[number]
            self.chunks.remove(number)
        self._tell(self._events.on_answer, number, kind, failure)

    def next_frame(self, now: float) -> Frame:
        pause_s = self._end.step(now)
        if self._frames:
            return self._frames.popleft(), NOTHING, 0.0
        head, chunk, chunk_pause_s = self._end.next_chunk(now)
        return head, chunk, min(pause_s, chunk_pause_s)

    def on_end(self, error: TriptychError | None) -> None:
        self._end.close()
        self.chunks.clear()
        self._tell(self._events.on_closed, error)

    def _cancel(self, number: int) -> None:
        self._frames.append(short_frame(FrameKind.CANCEL, number, self._end.cancel(number)))


class OutgoingLink:
    """One connection to the agent of the store `receiver`; `opened` fails if it cannot be established."""

    def __init__(
        self,
        receiver: str,
        transport: Transport,
        channel: FabricChannel,
        greet: Callable[[FabricChannel], None],
        rate: RateLimit,
        progress_timeout_s: float,
        on_closed: Callable[["OutgoingLink"], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.receiver = receiver
        self.transport = transport.kind
        self.opened: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.is_open = False
        self.is_lost = False  # once it is closed: neither ended here nor refused
        self._is_retired = False
        self._numbers = itertools.count(1)
        self._offers: dict[int, LinkedOffer] = {}
        self._leaving: dict[int, Callable[[], None]] = {}  # withdrawn, but perhaps a chunk is being sent
        self._slots = asyncio.Semaphore(MAX_OFFERS)
        self._on_closed = on_closed
        self._outbox = EntryOutbox(greet, self, rate, loop, transport)
        name = f"fabric to {receiver}"[:60]
        self._connection = FabricConnection(name, channel, self._outbox, progress_timeout_s)
        self._connection.start()

    @property
    def num_offers(self) -> int:
        return len(self._offers)

    # ---- by pushes -------------------------------------------------------------------------------
    async def offer(self, offer: Offer) -> LinkedOffer:
        """Send the offer; the caller must `withdraw` it in every case.

        Raises:
            EntryFailedError: the link has ended.
        """
        await self._slots.acquire()
        if self.closed.done():
            self._slots.release()
            raise EntryFailedError(TransferFailureKind.UNREACHABLE, "the link has ended")
        linked = LinkedOffer(next(self._numbers))
        self._offers[linked.number] = linked
        frame = json_frame(FrameKind.OFFER, linked.number, offer)
        self._connection.post(lambda: self._outbox.offer(linked.number, frame))
        return linked

    def send(self, linked: LinkedOffer, view: memoryview, encode_class: EncodeClass) -> None:
        """Send the entry's bytes; `view` must stay valid until `withdraw` calls `on_gone`."""
        self._connection.post(lambda: self._outbox.send(linked.number, view, encode_class))

    def change_class(self, linked: LinkedOffer, encode_class: EncodeClass) -> None:
        self._connection.post(lambda: self._outbox.chunks.change_class(linked.number, encode_class))

    def withdraw(self, linked: LinkedOffer, on_gone: Callable[[], None]) -> None:
        """End the offer; `on_gone` is called when its bytes are no longer read."""
        number = linked.number
        if self._offers.pop(number, None) is not None:
            self._slots.release()
        if self.closed.done():
            on_gone()
            return
        self._leaving[number] = on_gone
        self._connection.post(lambda: self._outbox.withdraw(number, lambda: self._on_gone(number)))
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
        resolve(self.opened)
        log.info("fabric link is up", target=self.receiver, transport=self.transport.value)

    def on_answer(self, number: int, kind: FrameKind, failure: OfferFailed | None) -> None:
        linked = self._offers.get(number)
        if linked is None:
            return
        if failure is not None:
            linked.fail(EntryFailedError(failure.kind, failure.detail))
        elif kind is FrameKind.STORED:
            resolve(linked.stored)
        elif not linked.answered.done():
            linked.answered.set_result(kind is FrameKind.ACCEPTED)

    def on_began(self, number: int) -> None:
        if (linked := self._offers.get(number)) is not None:
            linked.began_at = time.monotonic()

    def _on_gone(self, number: int) -> None:
        if (on_gone := self._leaving.pop(number, None)) is not None:
            on_gone()

    def on_closed(self, error: TriptychError | None) -> None:
        was_open, self.is_open = self.is_open, False
        detail = str(error) if error is not None else "the link was closed"
        if not self.opened.done():
            self.opened.set_exception(error or ChannelError(detail))
            self.opened.exception()
        is_refusal = isinstance(error, LinkRefusedError | MalformedMessageError)
        kind = TransferFailureKind.REFUSED if is_refusal else TransferFailureKind.UNREACHABLE
        for linked in list(self._offers.values()):
            linked.fail(EntryFailedError(kind, detail))
        if was_open and error is not None:
            log.warning("fabric link lost", target=self.receiver, error=detail)
        self._connection.join(1.0)  # this was its thread's last event
        self.closed.set_result(None)
        for number in list(self._leaving):
            self._on_gone(number)
        self.is_lost = error is not None and not isinstance(error, LinkRefusedError)
        self._on_closed(self)
