"""The end of a connection: what was posted goes out, and it is bounded."""

import socket
from collections import deque

from triptych_cache_store.fabric.wire.channel import FabricChannel
from triptych_cache_store.fabric.wire.connection import FabricConnection
from triptych_cache_store.fabric.wire.frames import FROM_SOURCE, FrameHeader, FrameKind, short_frame
from triptych_cache_store.fabric.wire.tcp_channel import TcpChannel
from triptych_common.domain.errors import TriptychError

NUM_ANSWERS = 100
NOTHING = memoryview(b"")


class Answers:
    """A side that answers; steps add to `frames`."""

    allowed = FROM_SOURCE

    def __init__(self) -> None:
        self.frames: deque[tuple[bytes, memoryview]] = deque()
        self.ends: list[TriptychError | None] = []

    def begin(self, channel: FabricChannel) -> None: ...

    def on_header(self, header: FrameHeader) -> None: ...

    def place_of_rest(self, rest: memoryview) -> memoryview:
        return rest

    def on_frame(self, header: FrameHeader, body: bytes) -> None: ...

    def on_body_received(self, part: memoryview) -> None: ...

    def next_frame(self, now: float) -> tuple[bytes, memoryview, float]:
        head, chunk = self.frames.popleft() if self.frames else (b"", NOTHING)
        return head, chunk, 0.0

    def on_body_sent(self, part: memoryview) -> None: ...

    def on_sent(self) -> None: ...

    def on_end(self, error: TriptychError | None) -> None:
        self.ends.append(error)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    far.settimeout(10.0)
    return near, far


def received_until_end(far: socket.socket) -> bytes:
    data = b""
    with far:
        while part := far.recv(1 << 16):
            data += part
    return data


def ended(side: Answers, connection: FabricConnection, far: socket.socket) -> bytes:
    """All that a connection sends that is stopped before it has begun."""
    connection.stop()
    connection.start()
    data = received_until_end(far)
    connection.join(10.0)
    assert side.ends == [None]
    return data


def test_all_that_is_posted_is_sent_before_the_end() -> None:
    near, far = tcp_pair()
    side = Answers()
    connection = FabricConnection("test", TcpChannel(near), side, 5.0)
    frames = [short_frame(FrameKind.STORED, number) for number in range(1, NUM_ANSWERS + 1)]
    for frame in frames:
        connection.post(lambda frame=frame: side.frames.append((frame, NOTHING)))  # type: ignore[misc]
    assert ended(side, connection, far) == b"".join(frames)


def test_no_chunk_is_begun_at_the_end() -> None:
    near, far = tcp_pair()
    side = Answers()
    connection = FabricConnection("test", TcpChannel(near), side, 5.0)
    cancel = short_frame(FrameKind.CANCEL, 1)
    side.frames.append((cancel, NOTHING))
    side.frames.append((b"head", memoryview(bytes(1 << 20))))
    assert ended(side, connection, far) == cancel


def test_the_end_does_not_wait_for_a_peer_that_reads_nothing() -> None:
    near, far = tcp_pair()
    side = Answers()
    connection = FabricConnection("test", TcpChannel(near), side, 5.0)
    for _ in range(64):
        side.frames.append((bytes(1 << 20), NOTHING))
    connection.stop()
    connection.start()
    connection.join(10.0)
    assert side.ends == [None]
    far.close()
