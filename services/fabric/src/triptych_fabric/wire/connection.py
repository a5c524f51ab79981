"""Thread of one connection: sends what it is given, reads frames, and ends if the peer makes no progress.

A `ConnectionSide` defines what frames mean and where bytes come from and go. All of a side but `post` and
`stop` runs in this thread. The event loop posts steps, which run in order between two sent frames.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from triptych_common.domain.errors import TriptychError
from triptych_common.telemetry.logs import get_logger
from triptych_fabric.wire.channel import ChannelError, FabricChannel, PeerSilentError
from triptych_fabric.wire.frames import (
    HEADER_BYTES,
    NOTHING,
    Frame,
    FrameHeader,
    FrameKind,
    read_header,
    short_frame,
)

log = get_logger(__name__)

KEEPALIVES_PER_TIMEOUT = 4
WAKE_BYTES = 512 << 10  # of a chunk: fewer are not worth a wake-up
READS_IN_TURN = 16  # before what is to be sent gets its turn


def resolve(future: "asyncio.Future[None]") -> None:
    """Resolve the future, unless it is done."""
    if not future.done():
        future.set_result(None)


class ConnectionSide:
    """Behaviour of one end of a connection; all methods run in the connection's thread."""

    allowed: frozenset[FrameKind]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """`loop` is where the side's owner lives."""
        self._loop = loop
        self._frames: deque[bytes] = deque()  # to be sent before any chunk
        self._last_number = 0  # of an offer

    def _tell(self, event: Callable[..., object], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(event, *arguments)

    def begin(self, channel: FabricChannel) -> None:
        """Run the handshake; raises ChannelError."""
        raise NotImplementedError

    def on_header(self, header: FrameHeader) -> memoryview | None:
        """Destination of a chunk's body; None if the body goes to `on_frame` only.

        Raises:
            MalformedMessageError: no such frame may come now.
        """
        raise NotImplementedError

    def place_of_rest(self, rest: memoryview) -> memoryview:
        """Destination of the rest of a chunk: `rest`, or a view of that size. Called after each wait."""
        return rest

    def on_frame(self, header: FrameHeader, body: bytes) -> None:
        """Handle a complete frame (a chunk without its body); raises MalformedMessageError."""
        raise NotImplementedError

    def next_frame(self, now: float) -> Frame:
        """Next frame and chunk to send; or nothing, and the seconds until the next call."""
        raise NotImplementedError

    def on_end(self, error: TriptychError | None) -> None:
        """Handle the end of the connection; `error` is None after `stop`."""
        raise NotImplementedError


class FabricConnection:
    """One connection of two agents, from its handshake to its end."""

    def __init__(
        self, name: str, channel: FabricChannel, side: ConnectionSide, progress_timeout_s: float
    ) -> None:
        self._channel = channel
        self._side = side
        self._progress_timeout_s = progress_timeout_s
        self._keepalive_s = progress_timeout_s / KEEPALIVES_PER_TIMEOUT
        self._steps: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self._head = NOTHING  # rest of the frame being sent
        self._chunk = NOTHING
        self._is_chunk_coming = False
        self._header = bytearray(HEADER_BYTES)
        self._frame: FrameHeader | None = None
        self._body = bytearray()
        self._into = memoryview(self._header)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, step: Callable[[], None]) -> None:
        """Run `step` in the thread; no effect once the connection has ended. Thread-safe."""
        self._steps.append(step)
        self._channel.wake()

    def stop(self) -> None:
        """Send posted frames but no new chunk, as far as the peer takes them at once; end. Thread-safe."""
        self._is_stopping = True
        self._channel.wake()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # ---- in the thread ---------------------------------------------------------------------------
    def _run(self) -> None:
        error: TriptychError | None = None
        try:
            self._side.begin(self._channel)
            self._carry()
            self._finish()
        except TriptychError as failure:
            error = failure
        except Exception:
            log.exception("fabric connection failed")
            error = ChannelError("a fault of ours")
        finally:
            self._chunk = NOTHING
            self._channel.close()
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._side.on_end(error)

    def _carry(self) -> None:
        now = time.monotonic()
        received_at = sent_at = now
        while not self._is_stopping:
            pause_s = self._fill(now, sent_at)
            has_sent = False
            while self._send():
                has_sent = True
            is_blocked = self._is_sending()  # the kernel takes no more now
            wait_s = 0.0 if has_sent and not is_blocked else min(pause_s, self._keepalive_s)
            num_bytes = min(len(self._into), WAKE_BYTES) if self._is_chunk_coming else 1
            is_readable = self._channel.wait(wait_s, writable=is_blocked, num_bytes=num_bytes)
            now = time.monotonic()
            if has_sent:
                sent_at = now
            # A slow chunk has fewer bytes ready, and still makes progress.
            if (is_readable or self._is_chunk_coming) and self._receive():
                received_at = now
            elif now - received_at > self._progress_timeout_s:
                raise PeerSilentError(f"the peer was silent for {self._progress_timeout_s:g} s")

    def _finish(self) -> None:
        """Send posted frames but no new chunk, as far as the kernel takes them."""
        while True:
            while self._send():
                pass
            if self._is_sending():
                return
            now = time.monotonic()
            self._fill(now, now)
            if self._chunk or not self._is_sending():
                return

    def _is_sending(self) -> bool:
        return bool(self._head) or bool(self._chunk)

    def _fill(self, now: float, sent_at: float) -> float:
        """Choose the next frame if none is being sent; returns the seconds until there may be another."""
        if self._is_sending():
            return self._keepalive_s
        while self._steps:
            self._steps.popleft()()
        head, self._chunk, pause_s = self._side.next_frame(now)
        if not head and now - sent_at >= self._keepalive_s:
            head = short_frame(FrameKind.KEEPALIVE)
        self._head = memoryview(head)
        return pause_s

    def _send(self) -> bool:
        """Send; True if the kernel took something."""
        if not self._is_sending():
            return False
        num_sent = self._channel.try_send([part for part in (self._head, self._chunk) if part])
        if not num_sent:
            return False
        num_head = min(num_sent, len(self._head))
        self._head = self._head[num_head:]
        self._chunk = self._chunk[num_sent - num_head :]
        return True

    def _receive(self) -> bool:
        """Receive; True if anything came."""
        has_received = False
        if self._is_chunk_coming:
            self._into = self._side.place_of_rest(self._into)
        for _ in range(READS_IN_TURN):
            num_read = self._channel.try_receive(self._into)
            if not num_read:
                break
            has_received = True
            self._into = self._into[num_read:]
            if not self._into:
                self._on_complete()
        return has_received

    def _on_complete(self) -> None:
        if self._frame is None:
            self._frame = read_header(self._header, self._side.allowed)
            place = self._side.on_header(self._frame)
            if place is not None:
                self._into = place
                self._is_chunk_coming = True
                return
            if self._frame.body_num_bytes:
                self._body = bytearray(self._frame.body_num_bytes)
                self._into = memoryview(self._body)
                return
        frame, self._frame = self._frame, None
        self._is_chunk_coming = False
        body, self._body = bytes(self._body), bytearray()
        self._into = memoryview(self._header)
        if frame.kind is not FrameKind.KEEPALIVE:
            self._side.on_frame(frame, body)
