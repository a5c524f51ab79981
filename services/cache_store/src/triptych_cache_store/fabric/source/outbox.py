"""What a connection to a target's agent sends, and what its answers mean. Its thread's alone, but for events.

Every method of the first part is a step that the event loop posts; answers go back to it as events.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from triptych_cache_store.fabric.source.byte_turns import ByteTurns, RateLimit
from triptych_cache_store.fabric.wire.channel import FabricChannel
from triptych_cache_store.fabric.wire.checksum import Checksum
from triptych_cache_store.fabric.wire.frames import (
    FROM_TARGET,
    MAX_CHUNK_BYTES,
    FrameHeader,
    FrameKind,
    OfferFailed,
    frame_header,
    read_body,
    short_frame,
)
from triptych_common.domain.errors import MalformedMessageError, TriptychError
from triptych_common.protocol.messages import EncodeClass

_AFTER_OFFER = frozenset({FrameKind.ACCEPTED, FrameKind.PRESENT, FrameKind.FAILED})
_AFTER_ACCEPTED = frozenset({FrameKind.FAILED})
_AFTER_END = frozenset({FrameKind.STORED, FrameKind.FAILED})
NEVER_S = 3600.0
NOTHING = memoryview(b"")


class OutboxEvents(Protocol):
    """Called in the event loop."""

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


class EntryOutbox:
    """The `ConnectionSide` of a source."""

    allowed = FROM_TARGET

    def __init__(
        self,
        greet: Callable[[FabricChannel], None],
        events: OutboxEvents,
        rate: RateLimit,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`greet`: the handshake."""
        self._greet = greet
        self._events = events
        self._rate = rate
        self._loop = loop
        self._frames: deque[bytes] = deque()
        self._turns = ByteTurns()
        self._sendings: dict[int, _Sending] = {}
        self._expected: dict[int, frozenset[FrameKind]] = {}
        self._last_number = 0
        self._current: _Sending | None = None  # whose chunk is being sent

    # ---- steps -----------------------------------------------------------------------------------
    def offer(self, number: int, frame: bytes) -> None:
        self._last_number = number
        self._expected[number] = _AFTER_OFFER
        self._frames.append(frame)

    def send(self, number: int, view: memoryview, encode_class: EncodeClass) -> None:
        """The target has accepted it, and it is sealed; `view` stays valid until it is sent or withdrawn."""
        if number in self._expected:
            self._sendings[number] = _Sending(number, view)
            self._turns.add(number, encode_class)

    def change_class(self, number: int, encode_class: EncodeClass) -> None:
        if number in self._sendings:
            self._turns.add(number, encode_class)

    def withdraw(self, number: int, on_gone: Callable[[], None]) -> None:
        """No more of it is sent. `on_gone`, in the event loop: its bytes are not read any more."""
        if self._expected.pop(number, None) is not None:
            self._frames.append(short_frame(FrameKind.CANCEL, number))
        self._drop(number)
        self._loop.call_soon_threadsafe(on_gone)

    # ---- the connection's side -------------------------------------------------------------------
    def begin(self, channel: FabricChannel) -> None:
        self._greet(channel)
        self._loop.call_soon_threadsafe(self._events.on_open)

    def on_header(self, header: FrameHeader) -> memoryview | None:
        if header.number > self._last_number:
            raise MalformedMessageError("an answer to what was not offered")
        return None

    def place_of_rest(self, rest: memoryview) -> memoryview:
        """A source gets no chunks."""
        return rest

    def on_frame(self, header: FrameHeader, body: bytes) -> None:
        number, kind = header.number, header.kind
        expected = self._expected.get(number)
        if expected is None:  # withdrawn meanwhile
            return
        if kind not in expected:
            raise MalformedMessageError(f"{kind.name} is no answer now")
        failure = read_body(OfferFailed, body) if kind is FrameKind.FAILED else None
        if kind is FrameKind.ACCEPTED:
            self._expected[number] = _AFTER_ACCEPTED
        else:
            del self._expected[number]
            self._drop(number)
        self._loop.call_soon_threadsafe(self._events.on_answer, number, kind, failure)

    def on_body_received(self, part: memoryview) -> None:
        """A source gets no chunks."""

    def next_frame(self, now: float) -> tuple[bytes, memoryview, float]:
        if self._frames:
            return self._frames.popleft(), NOTHING, 0.0
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
        self._sendings.clear()
        self._current = None
        self._loop.call_soon_threadsafe(self._events.on_closed, error)

    def _drop(self, number: int) -> None:
        self._sendings.pop(number, None)
        self._turns.remove(number)
