"""Sending side of a connection: sends entries and handles the target's answers, in the connection's thread.

The event loop posts the methods of the first part as steps; answers go back to it as events.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from triptych_cache_store.fabric.source.byte_turns import ByteTurns, RateLimit
from triptych_cache_store.fabric.source.region_writes import NEVER_S, RegionWrites
from triptych_cache_store.fabric.wire.channel import FabricChannel
from triptych_cache_store.fabric.wire.checksum import Checksum
from triptych_cache_store.fabric.wire.frames import (
    FROM_TARGET,
    FROM_TARGET_OF_NIXL,
    MAX_CHUNK_BYTES,
    FrameHeader,
    FrameKind,
    OfferFailed,
    frame_header,
    pack_count,
    read_address,
    read_body,
    short_frame,
)
from triptych_common.domain.errors import MalformedMessageError, TriptychError
from triptych_common.protocol.messages import EncodeClass

_AFTER_OFFER = frozenset({FrameKind.ACCEPTED, FrameKind.PRESENT, FrameKind.FAILED})
_AFTER_ACCEPTED = frozenset({FrameKind.FAILED})
_AFTER_END = frozenset({FrameKind.STORED, FrameKind.FAILED})
NOTHING = memoryview(b"")


class OutboxEvents(Protocol):
    """Events of an outbox, called in the event loop."""

    def on_open(self) -> None: ...

    def on_answer(self, number: int, kind: FrameKind, failure: OfferFailed | None) -> None: ...

    def on_began(self, number: int) -> None: ...

    def on_bytes_sent(self, number: int) -> None: ...

    def on_closed(self, error: TriptychError | None) -> None: ...


@dataclass
class _Sending:
    number: int
    view: memoryview
    position: int = 0
    checksum: Checksum = field(default_factory=Checksum)


@dataclass
class AcceptedOffer:
    """Offer accepted on a NIXL link: the target address and the number of chunks written."""

    address: int
    num_chunks: int = 0


class EntryOutbox:
    """Source's `ConnectionSide`: sends offers and entries' bytes, reads the target's answers."""

    def __init__(
        self,
        greet: Callable[[FabricChannel], None],
        events: OutboxEvents,
        rate: RateLimit,
        loop: asyncio.AbstractEventLoop,
        open_writes: Callable[[], RegionWrites] | None = None,
    ) -> None:
        """
        Args:
            greet: the handshake.
            open_writes: NIXL's; None: bytes go through the connection.
        """
        self.allowed = FROM_TARGET if open_writes is None else FROM_TARGET_OF_NIXL
        self._greet = greet
        self._open_writes = open_writes
        self._writes: RegionWrites | None = None
        self._accepted: dict[int, AcceptedOffer] = {}  # with NIXL: neither END nor CANCEL was sent
        self._events = events
        self._rate = rate
        self._loop = loop
        self._frames: deque[bytes] = deque()
        self._turns = ByteTurns()
        self._sendings: dict[int, _Sending] = {}
        self._expected: dict[int, frozenset[FrameKind]] = {}
        self._last_number = 0
        self._current: _Sending | None = None  # entry whose chunk is being sent

    # ---- steps -----------------------------------------------------------------------------------
    def offer(self, number: int, frame: bytes) -> None:
        self._last_number = number
        self._expected[number] = _AFTER_OFFER
        self._frames.append(frame)

    def send(self, number: int, view: memoryview, encode_class: EncodeClass) -> None:
        """Send an accepted, sealed entry; `view` must stay valid until it is sent or withdrawn."""
        if number in self._expected:
            self._sendings[number] = _Sending(number, view)
            self._turns.add(number, encode_class)

    def change_class(self, number: int, encode_class: EncodeClass) -> None:
        if number in self._sendings:
            self._turns.add(number, encode_class)

    def withdraw(self, number: int, on_gone: Callable[[], None]) -> None:
        """Stop sending; `on_gone` is called in the event loop when the bytes are no longer read."""
        if self._expected.pop(number, None) is not None:
            self._cancel(number)
        self._drop(number)
        if self._writes is None:
            self._loop.call_soon_threadsafe(on_gone)
        else:
            self._writes.when_over(number, partial(self._loop.call_soon_threadsafe, on_gone))

    # ---- the connection's side -------------------------------------------------------------------
    def begin(self, channel: FabricChannel) -> None:
        self._greet(channel)
        if self._open_writes is not None:
            self._writes = self._open_writes()  # open once the target's end is, too: `REGION`
        else:
            self._loop.call_soon_threadsafe(self._events.on_open)

    def on_header(self, header: FrameHeader) -> memoryview | None:
        if header.number > self._last_number:
            raise MalformedMessageError("an answer to what was not offered")
        return None

    def place_of_rest(self, rest: memoryview) -> memoryview:
        """Unused: a source receives no chunks."""
        return rest

    def on_frame(self, header: FrameHeader, body: bytes) -> None:
        number, kind = header.number, header.kind
        if kind is FrameKind.REGION and self._writes is not None:
            self._writes.connect(body)
            self._loop.call_soon_threadsafe(self._events.on_open)
            return
        expected = self._expected.get(number)
        if expected is None:  # withdrawn meanwhile
            return
        if kind not in expected:
            raise MalformedMessageError(f"{kind.name} is no answer now")
        failure = read_body(OfferFailed, body) if kind is FrameKind.FAILED else None
        if kind is FrameKind.ACCEPTED:
            self._expected[number] = _AFTER_ACCEPTED
            if self._writes is not None:
                self._accepted[number] = AcceptedOffer(read_address(body))
            elif body:
                raise MalformedMessageError("an ACCEPTED that says where")
        else:
            if number in self._accepted:
                self._cancel(number)  # the target waits to hear that no more is written
            del self._expected[number]
            self._drop(number)
        self._loop.call_soon_threadsafe(self._events.on_answer, number, kind, failure)

    def on_body_received(self, part: memoryview) -> None:
        """Unused: a source receives no chunks."""

    def next_frame(self, now: float) -> tuple[bytes, memoryview, float]:
        pause_s = NEVER_S if self._writes is None else self._write(self._writes, now)
        if self._frames:
            return self._frames.popleft(), NOTHING, 0.0
        if self._writes is not None:
            return b"", NOTHING, pause_s
        number = self._turns.next_number()
        if number is None:
            return b"", NOTHING, NEVER_S
        if (pause_s := self._rate.pause_s(now)) > 0:
            return b"", NOTHING, pause_s
        sending = self._current = self._sendings[number]
        if sending.position == 0:
            self._loop.call_soon_threadsafe(self._events.on_began, number)
        chunk = sending.view[sending.position : sending.position + MAX_CHUNK_BYTES]
        sending.position += len(chunk)
        self._turns.take_turn(number, len(chunk))
        self._rate.take(len(chunk), now)
        return frame_header(FrameKind.CHUNK, number, len(chunk)), chunk, 0.0

    def on_body_sent(self, part: memoryview) -> None:
        if self._current is not None:
            self._current.checksum.update(part)

    def on_sent(self) -> None:
        sending, self._current = self._current, None
        if sending is None or sending.position < len(sending.view) or sending.number not in self._sendings:
            return
        self._drop(sending.number)
        self._expected[sending.number] = _AFTER_END
        self._frames.appendleft(short_frame(FrameKind.END, sending.number, sending.checksum.digest()))
        self._loop.call_soon_threadsafe(self._events.on_bytes_sent, sending.number)

    def on_end(self, error: TriptychError | None) -> None:
        if self._writes is not None:
            self._writes.close()
        self._sendings.clear()
        self._current = None
        self._loop.call_soon_threadsafe(self._events.on_closed, error)

    # ---- with NIXL -------------------------------------------------------------------------------
    def _write(self, writes: RegionWrites, now: float) -> float:
        """Start writes while there is room; returns the seconds until the next call."""
        pause_s = writes.step(now)
        while writes.has_room() and (number := self._turns.next_number()) is not None:
            if (rate_pause_s := self._rate.pause_s(now)) > 0:
                return min(pause_s, rate_pause_s)
            sending, accepted = self._sendings[number], self._accepted[number]
            if sending.position == 0:
                self._frames.append(short_frame(FrameKind.WRITING, number))
                self._loop.call_soon_threadsafe(self._events.on_began, number)
            chunk = sending.view[sending.position : sending.position + MAX_CHUNK_BYTES]
            writes.start(number, chunk, accepted.address + sending.position)
            accepted.num_chunks += 1
            sending.checksum.update(chunk)
            sending.position += len(chunk)
            self._turns.take_turn(number, len(chunk))
            self._rate.take(len(chunk), now)
            if sending.position == len(sending.view):
                self._end_writes(sending)
            pause_s = 0.0
        return pause_s

    def _end_writes(self, sending: _Sending) -> None:
        number = sending.number
        self._drop(number)
        self._expected[number] = _AFTER_END
        num_chunks = self._accepted.pop(number).num_chunks
        body = sending.checksum.digest() + pack_count(num_chunks)
        self._frames.append(short_frame(FrameKind.END, number, body))
        self._loop.call_soon_threadsafe(self._events.on_bytes_sent, number)

    def _cancel(self, number: int) -> None:
        body = b""
        if self._writes is not None:
            accepted = self._accepted.pop(number, None)
            body = pack_count(0 if accepted is None else accepted.num_chunks)
        self._frames.append(short_frame(FrameKind.CANCEL, number, body))

    def _drop(self, number: int) -> None:
        self._sendings.pop(number, None)
        self._turns.remove(number)
