"""A connection waits for as much of a chunk as is of use, and takes less as progress; at its end what was
posted goes out, and it is bounded.
"""

import queue
import socket
from collections import deque

from triptych_common.domain.errors import TriptychError
from triptych_fabric.wire.channel import FabricChannel
from triptych_fabric.wire.connection import ConnectionSide, FabricConnection
from triptych_fabric.wire.frames import FROM_SENDER, FrameHeader, FrameKind, frame_header, short_frame

NUM_ANSWERS = 100
NOTHING = memoryview(b"")
NEVER_S = 3600.0


class Answers(ConnectionSide):
    """A side that answers; steps add to `frames`. Bytes of chunks go to `place`."""

    allowed = FROM_SENDER

    def __init__(self) -> None:
        self.frames: deque[tuple[bytes, memoryview]] = deque()
        self.ends: list[TriptychError | None] = []
        self.place = bytearray(1 << 20)
        self.rests: queue.Queue[int] = queue.Queue()  # bytes of the chunk that are still to come

    def begin(self, channel: FabricChannel) -> None: ...

    def on_header(self, header: FrameHeader) -> memoryview | None:
        return memoryview(self.place)[: header.body_num_bytes] if header.kind is FrameKind.CHUNK else None

    def place_of_rest(self, rest: memoryview) -> memoryview:
        self.rests.put(len(rest))
        return rest

    def on_frame(self, header: FrameHeader, body: bytes) -> None: ...

    def next_frame(self, now: float) -> tuple[bytes, memoryview, float]:
        if self.frames:
            return *self.frames.popleft(), 0.0
        return b"", NOTHING, NEVER_S

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
    connection = FabricConnection("test", FabricChannel(near), side, 5.0)
    frames = [short_frame(FrameKind.STORED, number) for number in range(1, NUM_ANSWERS + 1)]
    for frame in frames:
        connection.post(lambda frame=frame: side.frames.append((frame, NOTHING)))
    assert ended(side, connection, far) == b"".join(frames)


def test_no_chunk_is_begun_at_the_end() -> None:
    near, far = tcp_pair()
    side = Answers()
    connection = FabricConnection("test", FabricChannel(near), side, 5.0)
    cancel = short_frame(FrameKind.CANCEL, 1)
    side.frames.append((cancel, NOTHING))
    side.frames.append((b"head", memoryview(bytes(1 << 20))))
    assert ended(side, connection, far) == cancel


def test_the_end_does_not_wait_for_a_peer_that_reads_nothing() -> None:
    near, far = tcp_pair()
    side = Answers()
    connection = FabricConnection("test", FabricChannel(near), side, 5.0)
    for _ in range(64):
        side.frames.append((bytes(1 << 20), NOTHING))
    connection.stop()
    connection.start()
    connection.join(10.0)
    assert side.ends == [None]
    far.close()


def test_a_wait_for_a_part_of_a_chunk_does_not_end_for_less() -> None:
    near, far = tcp_pair()
    channel, into = FabricChannel(near), memoryview(bytearray(1000))
    far.sendall(bytes(99))
    assert not channel.wait(0.05, writable=False, num_bytes=100)
    assert channel.try_receive(into[:9]) == 9, "what is there can be had all the same"
    far.sendall(bytes(10))
    assert channel.wait(10.0, writable=False, num_bytes=100)
    assert channel.try_receive(into) == 100
    far.sendall(b"x")
    assert channel.wait(10.0, writable=False), "of the next frame one byte is enough"
    far.close()
    assert channel.wait(10.0, writable=False, num_bytes=100), "the end is seen"
    channel.close()


def test_a_chunk_that_comes_byte_by_byte_is_progress() -> None:
    near, far = tcp_pair()
    side = Answers()
    connection = FabricConnection("test", FabricChannel(near), side, 1.5)
    connection.start()
    far.sendall(frame_header(FrameKind.CHUNK, 1, 1 << 20))
    for position in range(5):  # longer together than the peer may be silent
        far.sendall(b"x")
        while side.place[position] != ord("x"):
            side.rests.get(timeout=10.0)
    connection.stop()
    received_until_end(far)
    connection.join(10.0)
    assert side.ends == [None]
    assert bytes(side.place[:6]) == b"xxxxx\0"
