"""Receiving side of a connection: writes accepted entries into reservations, in the connection's thread.

It writes only into reservations that the event loop handed over, and only while the region's header still
names this agent as the writer. Bytes for an offer that has ended are read and dropped.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from triptych_cache_store.fabric.target.written_chunks import WrittenChunks
from triptych_cache_store.fabric.wire.channel import FabricChannel
from triptych_cache_store.fabric.wire.checksum import Checksum
from triptych_cache_store.fabric.wire.frames import (
    DIGEST_BYTES,
    FROM_SOURCE,
    FROM_SOURCE_OF_NIXL,
    MAX_CHUNK_BYTES,
    MAX_LIVE_OFFERS,
    FrameHeader,
    FrameKind,
    Offer,
    OfferFailed,
    json_frame,
    pack_address,
    read_body,
    read_count,
    short_frame,
)
from triptych_cache_store.fabric.wire.handshake import Admitted
from triptych_common.domain.errors import MalformedMessageError, StoreError, TriptychError
from triptych_common.protocol.messages import FabricTransport
from triptych_common.region.fence import Place, check_reservation
from triptych_common.region.mapping import RegionMapping

MAX_UNREAD_FRAMES = 2 * MAX_LIVE_OFFERS  # answers that the peer does not read
NEVER_S = 3600.0
NOTHING = memoryview(b"")


class InboxEvents(Protocol):
    """Events of an inbox, called in the event loop."""

    def on_admitted(self, admitted: Admitted) -> None: ...

    def on_offer(self, number: int, offer: Offer) -> None: ...

    def on_began(self, number: int) -> None: ...

    def on_received(self, number: int, is_intact: bool) -> None: ...

    def on_withdrawn(self, number: int) -> None: ...

    def on_closed(self, error: TriptychError | None) -> None: ...


@dataclass
class Sink:
    """Blocks of one of this agent's reservations, for one entry."""

    place: Place
    view: memoryview
    position: int = 0
    checksum: Checksum = field(default_factory=Checksum)


class EntryInbox:
    """The `ConnectionSide` of a target."""

    def __init__(
        self,
        admit: Callable[[FabricChannel], Admitted],
        events: InboxEvents,
        mapping: RegionMapping,
        loop: asyncio.AbstractEventLoop,
        open_chunks: Callable[[], WrittenChunks] | None = None,
    ) -> None:
        """
        Args:
            admit: the handshake.
            open_chunks: NIXL's, for links by it.
        """
        self.allowed = FROM_SOURCE
        self._open_chunks = open_chunks
        self._chunks: WrittenChunks | None = None
        self._admit = admit
        self._events = events
        self._mapping = mapping
        self._loop = loop
        self._frames: deque[bytes] = deque()
        self._live: dict[int, Sink | None] = {}  # bytes may come; None: not accepted yet
        self._unended: set[int] = set()  # offers that the event loop still has
        self._withdrawn: set[int] = set()  # offers whose source no longer waits
        self._last_number = 0
        self._dropped = memoryview(b"")
        self._chunk_of: int | None = None  # number of the offer whose chunk is being read

    # ---- steps -----------------------------------------------------------------------------------
    def accept(self, number: int, sink: Sink) -> None:
        """Accept the entry's bytes; no effect if the offer was withdrawn meanwhile."""
        if number not in self._live:
            return
        self._live[number] = sink
        body = b""
        if self._chunks is not None:
            num_bytes = len(sink.view)
            address = self._chunks.open(
                number, sink.place.offset, num_bytes, partial(self._on_written, number, sink)
            )
            body = pack_address(address)
        self._frames.append(short_frame(FrameKind.ACCEPTED, number, body))

    def answer(self, number: int, kind: FrameKind) -> None:
        """Answer `PRESENT` or `STORED`, which ends the offer."""
        if self._end(number):
            self._frames.append(short_frame(kind, number))

    def drop(self, number: int, failure: OfferFailed, on_gone: Callable[[], None]) -> None:
        """End the offer; `on_gone` is called in the event loop when nothing is written for it any more."""
        if self._end(number):
            self._frames.append(json_frame(FrameKind.FAILED, number, failure))
        if self._chunks is None:
            self._loop.call_soon_threadsafe(on_gone)  # the rest of a chunk: `place_of_rest`
        else:
            self._chunks.when_over(number, partial(self._loop.call_soon_threadsafe, on_gone))

    # ---- the connection's side -------------------------------------------------------------------
    def begin(self, channel: FabricChannel) -> None:
        admitted = self._admit(channel)
        if admitted.transport is FabricTransport.NIXL and self._open_chunks is not None:
            self._chunks = self._open_chunks()
            self.allowed = FROM_SOURCE_OF_NIXL
            self._frames.append(short_frame(FrameKind.REGION, 0, self._chunks.metadata()))
        self._loop.call_soon_threadsafe(self._events.on_admitted, admitted)

    def on_header(self, header: FrameHeader) -> memoryview | None:
        kind, number, num_bytes = header
        if kind is FrameKind.OFFER:
            if number <= self._last_number:
                raise MalformedMessageError("an offer with the number of an earlier one")
            if len(self._unended) >= MAX_LIVE_OFFERS:
                raise MalformedMessageError("more offers at once than are allowed")
            if len(self._frames) >= MAX_UNREAD_FRAMES:
                raise MalformedMessageError("more offers without reading their answers")
            self._last_number = number
        elif number > self._last_number:
            raise MalformedMessageError(f"{kind.name} for what was not offered")
        if kind is not FrameKind.CHUNK:
            return None
        if number not in self._live:
            return self._scratch(num_bytes)
        sink = self._live[number]
        if sink is None:
            raise MalformedMessageError("bytes of an entry that was not accepted")
        if num_bytes > len(sink.view) - sink.position:
            raise MalformedMessageError("more bytes than the entry has")
        if not self._is_still_ours(number, sink):
            return self._scratch(num_bytes)
        self._chunk_of = number
        return sink.view[sink.position : sink.position + num_bytes]

    def place_of_rest(self, rest: memoryview) -> memoryview:
        number = self._chunk_of
        if number is None:
            return rest
        sink = self._live.get(number)
        if sink is not None and self._is_still_ours(number, sink):
            return rest
        self._chunk_of = None
        return self._scratch(len(rest))

    def on_frame(self, header: FrameHeader, body: bytes) -> None:
        kind, number, num_bytes = header
        self._chunk_of = None
        if kind is FrameKind.OFFER:
            offer = read_body(Offer, body)
            self._live[number] = None
            self._unended.add(number)
            self._loop.call_soon_threadsafe(self._events.on_offer, number, offer)
        elif kind is FrameKind.CANCEL:
            self._on_cancel(number, body)
        elif self._chunks is not None:
            self._on_written_frame(self._chunks, header, body)
        elif number not in self._live:
            return
        elif (sink := self._live[number]) is None:
            raise MalformedMessageError(f"{kind.name} for an entry that was not accepted")
        elif kind is FrameKind.CHUNK:
            if sink.position == 0:
                self._loop.call_soon_threadsafe(self._events.on_began, number)
            sink.position += num_bytes
        else:
            self._on_end_of_entry(number, sink, body)

    def on_body_received(self, part: memoryview) -> None:
        sink = None if self._chunk_of is None else self._live.get(self._chunk_of)
        if sink is not None:
            sink.checksum.update(part)

    def next_frame(self, now: float) -> tuple[bytes, memoryview, float]:
        pause_s = NEVER_S if self._chunks is None else self._chunks.step(now)
        return self._frames.popleft() if self._frames else b"", NOTHING, pause_s

    def on_body_sent(self, part: memoryview) -> None:
        """Unused: a target sends no chunks."""

    def on_sent(self) -> None:
        """Unused: no caller waits for a sent frame."""

    def on_end(self, error: TriptychError | None) -> None:
        if self._chunks is not None:
            self._chunks.close()
        self._live.clear()
        self._unended.clear()
        self._withdrawn.clear()
        self._loop.call_soon_threadsafe(self._events.on_closed, error)

    def _on_end_of_entry(self, number: int, sink: Sink, digest: bytes) -> None:
        if sink.position != len(sink.view) or len(digest) != DIGEST_BYTES:
            raise MalformedMessageError("fewer bytes than the entry has")
        del self._live[number]
        is_intact = sink.checksum.digest() == digest
        self._loop.call_soon_threadsafe(self._events.on_received, number, is_intact)

    def _is_still_ours(self, number: int, sink: Sink) -> bool:
        """True if the reservation is still this agent's; otherwise the offer fails."""
        try:
            check_reservation(self._mapping, sink.place, len(sink.view))
        except (StoreError, ValueError):
            del self._live[number]
            self._loop.call_soon_threadsafe(self._events.on_received, number, False)
            return False
        return True

    def _on_written_frame(self, chunks: WrittenChunks, header: FrameHeader, body: bytes) -> None:
        """Handle `WRITING` or `END`; the offer may have ended here meanwhile."""
        number = header.number
        if self._live.get(number, NOTHING) is None:
            raise MalformedMessageError(f"{header.kind.name} for an entry that was not accepted")
        if header.kind is FrameKind.WRITING:
            chunks.begin(number)
            self._loop.call_soon_threadsafe(self._events.on_began, number)
        else:
            chunks.end(number, read_count(body[DIGEST_BYTES:]), body[:DIGEST_BYTES])

    def _on_written(self, number: int, sink: Sink, digest: bytes | None) -> None:
        """Check an entry whose NIXL writes are complete."""
        if digest is None or self._live.get(number) is not sink or not self._is_still_ours(number, sink):
            return
        sink.checksum.update(sink.view)
        sink.position = len(sink.view)
        self._on_end_of_entry(number, sink, digest)

    def _on_cancel(self, number: int, body: bytes) -> None:
        if self._chunks is not None:
            self._chunks.end(number, read_count(body), None)
        elif body:
            raise MalformedMessageError("a CANCEL that says something")
        if number not in self._unended:
            return
        self._withdrawn.add(number)
        if number in self._live:  # otherwise the entry is complete and being stored
            del self._live[number]
            self._loop.call_soon_threadsafe(self._events.on_withdrawn, number)

    def _end(self, number: int) -> bool:
        """Remove the offer; True if its source waits for an answer."""
        self._live.pop(number, None)
        self._unended.discard(number)
        is_withdrawn = number in self._withdrawn
        self._withdrawn.discard(number)
        return not is_withdrawn

    def _scratch(self, num_bytes: int) -> memoryview:
        if not self._dropped:
            self._dropped = memoryview(bytearray(MAX_CHUNK_BYTES))
        return self._dropped[:num_bytes]
