"""Connection from another agent: its offers and their entries, in the event loop and in its thread."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from triptych_common.domain.errors import MalformedMessageError, StoreError, TriptychError
from triptych_common.protocol.messages import FabricTransport
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_common.region.fence import check_reservation
from triptych_common.region.mapping import RegionMapping
from triptych_common.telemetry.logs import get_logger
from triptych_common.telemetry.tracing import span
from triptych_fabric.local_store import LocalStore
from triptych_fabric.metrics import FabricMetrics
from triptych_fabric.receiver.reception import ByteBudget, Reception
from triptych_fabric.transports.transport import ReceiverEnd, Sink, Transport
from triptych_fabric.wire.channel import FabricChannel
from triptych_fabric.wire.connection import ConnectionSide, FabricConnection, resolve
from triptych_fabric.wire.frames import (
    DIGEST_BYTES,
    FROM_SENDER,
    MAX_LIVE_OFFERS,
    NOTHING,
    Frame,
    FrameHeader,
    FrameKind,
    Offer,
    OfferFailed,
    json_frame,
    read_body,
    short_frame,
)
from triptych_fabric.wire.handshake import Admitted, Identity, LinkRefusedError, admit_sender
from triptych_fabric.wire.keys import Credentials

log = get_logger(__name__)

MAX_UNREAD_FRAMES = 2 * MAX_LIVE_OFFERS  # answers that the peer does not read


@dataclass(frozen=True)
class ReceiverParts:
    own: Identity
    credentials: Credentials
    store: LocalStore
    budget: ByteBudget
    metrics: FabricMetrics
    group: asyncio.TaskGroup
    transports: Mapping[FabricTransport, Transport]
    progress_timeout_s: float


class EntryInbox(ConnectionSide):
    """Receiving side of a connection, in its thread: writes accepted entries into reservations.

    It writes only into reservations that the event loop handed over, and only while the region's header still
    names this agent as the writer. Bytes for an offer that has ended are read and dropped.
    """

    def __init__(
        self,
        admit: Callable[[FabricChannel], Admitted],
        events: "FabricPeer",
        mapping: RegionMapping,
        loop: asyncio.AbstractEventLoop,
        transport_of: Callable[[FabricTransport], Transport],
    ) -> None:
        super().__init__(loop)
        self.allowed = FROM_SENDER
        self._admit = admit
        self._events = events
        self._mapping = mapping
        self._transport_of = transport_of
        self._end = ReceiverEnd(self)  # until the sender is admitted
        self._live: dict[int, Sink | None] = {}  # bytes may come; None: not accepted yet
        self._unended: set[int] = set()  # offers that the event loop still has
        self._withdrawn: set[int] = set()  # offers whose sender no longer waits

    # ---- steps -----------------------------------------------------------------------------------
    def accept(self, number: int, sink: Sink) -> None:
        """Accept the entry's bytes; no effect if the offer was withdrawn meanwhile."""
        if number in self._live:
            self._live[number] = sink
            self._frames.append(short_frame(FrameKind.ACCEPTED, number, self._end.accept(number, sink)))

    def answer(self, number: int, kind: FrameKind) -> None:
        """Answer `PRESENT` or `STORED`, which ends the offer."""
        if self._close_offer(number):
            self._frames.append(short_frame(kind, number))

    def drop(self, number: int, failure: OfferFailed, on_gone: Callable[[], None]) -> None:
        """End the offer; `on_gone` is called in the event loop when nothing is written for it any more."""
        if self._close_offer(number):
            self._frames.append(json_frame(FrameKind.FAILED, number, failure))
        self._end.when_unwritten(number, partial(self._tell, on_gone))

    # ---- for the transport -----------------------------------------------------------------------
    def sink_of(self, number: int) -> Sink | None:
        """See `ReceiverLink.sink_of` for the contract."""
        if number not in self._live:
            return None
        sink = self._live[number]
        if sink is None:
            raise MalformedMessageError("bytes of an entry that was not accepted")
        return sink

    def is_still_ours(self, number: int, sink: Sink) -> bool:
        """See `ReceiverLink.is_still_ours` for the contract."""
        try:
            check_reservation(self._mapping, sink, len(sink.view))
        except (StoreError, ValueError):
            del self._live[number]
            self._tell(self._events.on_received, number, False)
            return False
        return True

    def end_entry(self, number: int, sink: Sink, digest: bytes) -> None:
        """See `ReceiverLink.end_entry` for the contract."""
        if sink.position != len(sink.view) or len(digest) != DIGEST_BYTES:
            raise MalformedMessageError("fewer bytes than the entry has")
        del self._live[number]
        self._tell(self._events.on_received, number, sink.checksum.digest() == digest)

    # ---- the connection's side -------------------------------------------------------------------
    def begin(self, channel: FabricChannel) -> None:
        self.open(self._admit(channel))

    def open(self, admitted: Admitted) -> None:
        self._end = self._transport_of(admitted.transport).receiver_end(self)
        self.allowed = self._end.allowed
        if region := self._end.open():
            self._frames.append(short_frame(FrameKind.REGION, 0, region))
        self._tell(self._events.on_admitted, admitted)

    def on_header(self, header: FrameHeader) -> memoryview | None:
        kind, number, _ = header
        if kind is not FrameKind.OFFER:
            if number > self._last_number:
                raise MalformedMessageError(f"{kind.name} for an offer that was not made")
            return self._end.on_header(header)
        if number <= self._last_number:
            raise MalformedMessageError("an offer with the number of an earlier one")
        if len(self._unended) >= MAX_LIVE_OFFERS:
            raise MalformedMessageError("more offers at once than are allowed")
        if len(self._frames) >= MAX_UNREAD_FRAMES:
            raise MalformedMessageError("more offers without reading their answers")
        self._last_number = number
        return None

    def place_of_rest(self, rest: memoryview) -> memoryview:
        return self._end.place_of_rest(rest)

    def on_frame(self, header: FrameHeader, body: bytes) -> None:
        number = header.number
        if header.kind is FrameKind.OFFER:
            offer = read_body(Offer, body)
            self._live[number] = None
            self._unended.add(number)
            self._tell(self._events.on_offer, number, offer)
        elif header.kind is FrameKind.CANCEL:
            self._end.on_cancel(number, body)
            if number in self._unended:
                self._withdrawn.add(number)
                if number in self._live:  # otherwise the entry is complete and being stored
                    del self._live[number]
                    self._tell(self._events.on_withdrawn, number)
        else:
            self._end.on_frame(header, body)

    def next_frame(self, now: float) -> Frame:
        pause_s = self._end.step(now)
        return self._frames.popleft() if self._frames else b"", NOTHING, pause_s

    def on_end(self, error: TriptychError | None) -> None:
        self._end.close()
        self._live.clear()
        self._unended.clear()
        self._withdrawn.clear()
        self._tell(self._events.on_closed, error)

    def _close_offer(self, number: int) -> bool:
        """Remove the offer; True if its sender waits for an answer."""
        self._live.pop(number, None)
        self._unended.discard(number)
        is_withdrawn = number in self._withdrawn
        self._withdrawn.discard(number)
        return not is_withdrawn


class FabricPeer:
    """Connection of one sender; `sender` is None until the handshake has proved its store's name."""

    def __init__(
        self, parts: ReceiverParts, channel: FabricChannel, on_closed: Callable[["FabricPeer"], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.sender: str | None = None
        self.closed: asyncio.Future[None] = loop.create_future()
        self._transport = FabricTransport.TCP
        self._parts = parts
        self._on_closed = on_closed
        self._receptions: dict[int, Reception] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        deadline = time.monotonic() + parts.progress_timeout_s

        def admit(taken: FabricChannel) -> Admitted:
            return admit_sender(taken, parts.own, parts.credentials, deadline)

        self._inbox = EntryInbox(admit, self, parts.store.mapping, loop, parts.transports.__getitem__)
        self._connection = FabricConnection("fabric peer", channel, self._inbox, parts.progress_timeout_s)
        self._connection.start()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def close(self) -> None:
        """Close the connection; `closed` resolves later."""
        self._connection.stop()

    # ---- for receptions --------------------------------------------------------------------------
    def accept(self, number: int, sink: Sink) -> None:
        self._connection.post(lambda: self._inbox.accept(number, sink))

    def answer(self, number: int, kind: FrameKind) -> None:
        self._connection.post(lambda: self._inbox.answer(number, kind))

    async def drop(self, number: int, failure: OfferFailed) -> None:
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection.post(lambda: self._inbox.drop(number, failure, lambda: resolve(gone)))
        ends = {gone, self.closed}
        timeout_s = self._parts.progress_timeout_s
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():  # the peer reads nothing: steps wait for what is being sent to it
            self.close()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)

    # ---- events of its thread --------------------------------------------------------------------
    def on_admitted(self, admitted: Admitted) -> None:
        if admitted.generation != self._parts.own.generation:  # the store was restarted meanwhile
            self.close()
            return
        self.sender = admitted.sender
        self._transport = admitted.transport
        log.info("fabric peer connected", source=self.sender, transport=self._transport.value)

    def on_offer(self, number: int, offer: Offer) -> None:
        reception = Reception(number, offer, self._parts.store, self._parts.budget, self)
        self._receptions[number] = reception
        self._idle.clear()
        if self.closed.done():
            reception.on_withdrawn()
        self._parts.group.create_task(self._run(reception))

    def on_received(self, number: int, is_intact: bool) -> None:
        if (reception := self._receptions.get(number)) is not None:
            reception.on_received(is_intact)

    def on_withdrawn(self, number: int) -> None:
        if (reception := self._receptions.get(number)) is not None:
            reception.on_withdrawn()

    def on_closed(self, error: TriptychError | None) -> None:
        self._connection.join(1.0)  # this was its thread's last event
        self.closed.set_result(None)
        for reception in list(self._receptions.values()):
            reception.on_withdrawn()
        if isinstance(error, LinkRefusedError):
            self._parts.metrics.refused.labels(error.reason.value if error.reason else "other").inc()
        if isinstance(error, LinkRefusedError | MalformedMessageError) or self.sender is None:
            if error is not None:
                log.warning("fabric peer cut off", source=self.sender, error=str(error))
        elif error is not None:
            log.info("fabric peer gone", source=self.sender, error=str(error))
        self._on_closed(self)

    async def _run(self, reception: Reception) -> None:
        offer, metrics, transport = reception.offer, self._parts.metrics, self._transport.value
        sender = metrics.peer(self.sender or "")
        attributes: dict[str, str | int] = {
            "triptych.mm_hash": offer.mm_hash,
            "triptych.source": self.sender or "",
            "triptych.target": self._parts.store.name,
            "triptych.transport": transport,
            "triptych.num_bytes": offer.spec.num_bytes,
        }
        try:
            if self._parts.own.is_draining:
                failure = OfferFailed(kind=TransferFailureKind.UNREACHABLE, detail="it is draining")
                await self.drop(reception.number, failure)
                outcome = failure.kind.value
            else:
                with span("fabric.receive", traceparent=offer.traceparent, attributes=attributes) as recorded:
                    outcome = await reception.run()
                    recorded.set_attribute("triptych.outcome", outcome)
        except Exception:  # not even given back; it costs the connection, not the agent
            log.exception("fabric offer failed", mm_hash=offer.mm_hash)
            self.close()
            return
        finally:
            del self._receptions[reception.number]
            if not self._receptions:
                self._idle.set()
        metrics.receptions.labels(outcome, sender).inc()
        if outcome == "sealed":
            metrics.received_bytes.labels(sender, transport).inc(offer.spec.num_bytes)
