"""Connections between agents: what `wire.connection` does with sockets and threads, in steps of the world.

A thread has two kinds of steps: it takes what its event loop has posted and sends one frame, or it reads one
frame. The handshake is one message and its answer. What frames mean is the real code's (`EntryOutbox`,
`EntryInbox`), and so are their bytes.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.support.protocol_world.virtual_loop import CLOCK
from triptych_common.domain.errors import MalformedMessageError, TriptychError
from triptych_common.protocol.messages import FabricTransport
from triptych_fabric.receiver import peer
from triptych_fabric.sender import link, links
from triptych_fabric.transports import transport
from triptych_fabric.wire.channel import ChannelClosedError, PeerSilentError
from triptych_fabric.wire.frames import HEADER_BYTES, FrameKind, read_header
from triptych_fabric.wire.handshake import Admitted, LinkRefusedError, RefusalReason

CHUNK_BYTES = 16  # of an item of two rows: half of it


class Hello(NamedTuple):
    """Of a source: what its target shall be."""

    store: str
    generation: int


class Welcome(NamedTuple):
    """The target's answer."""


class Refused(NamedTuple):
    reason: RefusalReason


class Frame(NamedTuple):
    head: bytes  # with the body of all but chunks
    chunk: bytes

    @property
    def kind(self) -> FrameKind:
        return FrameKind(self.head[0])


class End(NamedTuple):
    """The other end is closed; nothing follows."""


Sent = Hello | Welcome | Refused | Frame | End


class Socket:
    """One end of a connection. What was sent on it is read, though its sender has died since."""

    peer: "Socket"

    def __init__(self, number: int, owner: str, *, is_source: bool) -> None:
        self.number = number
        self.owner = owner
        self.is_source = is_source
        self.inbox: deque[Sent] = deque()
        self.connection: PlayedConnection | None = None
        self.is_cut = False  # the network carries nothing any more
        self.is_closed = False

    def send(self, frame: Sent) -> None:
        if not (self.is_cut or self.is_closed or self.peer.is_closed):
            self.peer.inbox.append(frame)

    def close(self) -> None:
        self.send(End())
        self.is_closed = True
        self.inbox.clear()

    def cut(self) -> None:
        for end in (self, self.peer):
            end.is_cut = True
            end.inbox.clear()


class PlayedConnection:
    """Stands in for `FabricConnection`."""

    def __init__(self, name: str, channel: Socket, side: Any, progress_timeout_s: float) -> None:
        self._socket = channel
        self.side = side
        self.steps: deque[Callable[[], None]] = deque()
        self.is_open = False  # the handshake has succeeded
        self.is_stopping = False
        self.is_over = False
        channel.connection = self

    # ---- for the event loop ----------------------------------------------------------------------
    def start(self) -> None:
        if self._socket.is_source:
            told = self.side._greet.keywords  # as `greet_receiver` takes them
            self._socket.send(Hello(told["sender"], told["generation"]))

    def post(self, step: Callable[[], None]) -> None:
        if not self.is_over:
            self.steps.append(step)

    def stop(self) -> None:
        self.is_stopping = True

    def join(self, timeout_s: float) -> None:
        """Its end was the last it did."""

    # ---- what the world does, in the process' loop -----------------------------------------------
    @property
    def can_send(self) -> bool:
        """Has the thread anything to do but to read?"""
        if self.is_over:
            return False
        has_frames = bool(self.side._frames) or bool(getattr(self.side, "chunks", ()))
        return bool(self.steps) or self.is_stopping or (self.is_open and has_frames)

    def send_next(self) -> None:
        while self.steps:
            self.steps.popleft()()
        if self.is_stopping:
            while self.is_open and self.side._frames:
                self._send_frame()
            self._end(None)
        elif self.is_open:
            self._send_frame()

    def _send_frame(self) -> None:
        head, chunk, _ = self.side.next_frame(CLOCK.now)
        if head:
            self._socket.send(Frame(bytes(head), bytes(chunk)))

    def receive_next(self) -> None:
        try:
            match self._socket.inbox.popleft():
                case Hello() as hello:
                    self._admit(hello)
                case Welcome():
                    self.is_open = True
                    asyncio.get_running_loop().call_soon(self.side._events.on_open)
                case Refused(reason):
                    raise LinkRefusedError("refused", reason)
                case Frame() as frame:
                    self._on_frame(frame)
                case End():
                    raise ChannelClosedError("the peer closed it")
        except TriptychError as error:
            self._end(error)

    def notice_silence(self) -> None:
        self._end(PeerSilentError("the peer was silent"))

    def _admit(self, hello: Hello) -> None:
        own = self.side._events._parts.own
        reason = RefusalReason.BUSY if own.is_draining else RefusalReason.STORE
        if own.is_draining or hello.generation != own.generation:
            self._socket.send(Refused(reason))
            raise LinkRefusedError("refused", reason)
        self._socket.send(Welcome())
        self.is_open = True
        self.side.open(Admitted(*hello, FabricTransport.TCP))

    def _on_frame(self, frame: Frame) -> None:
        header = read_header(frame.head[:HEADER_BYTES], self.side.allowed)
        place = self.side.on_header(header)
        if place is not None:
            place[:] = frame.chunk
        elif frame.chunk:
            raise MalformedMessageError("a chunk without a place")
        self.side.on_frame(header, frame.head[HEADER_BYTES:])

    def _end(self, error: TriptychError | None) -> None:
        self.is_over = True
        self._socket.close()
        self.side.on_end(error)


class Switch:
    """Whom an agent can call now: of the one world that lives, as the clock is."""

    def __init__(self) -> None:
        self.call: Callable[[str, Any], Socket] = _nobody


def _nobody(owner: str, endpoint: Any) -> Socket:
    raise OSError("nobody listens there")


SWITCH = Switch()


async def _connect(endpoint: Any) -> Socket:
    loop: Any = asyncio.get_running_loop()
    return SWITCH.call(loop.name, endpoint)


def _channel(socket: Socket) -> Socket:
    return socket


FABRIC_STAND_INS: tuple[tuple[Any, str, Any], ...] = (
    (links, "_connect", _connect),
    (links, "FabricChannel", _channel),
    (link, "FabricConnection", PlayedConnection),
    (peer, "FabricConnection", PlayedConnection),
    (transport, "MAX_CHUNK_BYTES", CHUNK_BYTES),
)
"""For `virtual_time`."""
