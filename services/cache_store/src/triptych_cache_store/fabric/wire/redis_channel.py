"""Channel over two Redis streams, for agents that cannot reach each other.

    source ──XADD──▶ link:{id}:to-target ──XREADGROUP──▶ target
           ◀──XREADGROUP── link:{id}:to-source ◀──XADD──

The source creates both streams. A reader deletes each entry and reports in its next one how much it has
taken: at most `WINDOW_BYTES` per direction are in Redis. Reads block in Redis on a connection of their own,
which the thread polls together with everything else. Both streams expire soon after their ends stop renewing
them; a closing end deletes its incoming stream, and its peer the other.
"""

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triptych_cache_store.fabric.wire.channel import ChannelClosedError, ChannelError
from triptych_cache_store.fabric.wire.redis_entries import (
    MAX_PAYLOAD_BYTES,
    EntryKind,
    EntrySeal,
    cost_of,
)
from triptych_common.domain.errors import BusRefusedError, BusUnavailableError
from triptych_common.protocol.messages import FabricTransport
from triptych_common.redis_client.polled import Command, PolledConnection
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

WINDOW_BYTES = 4 << 20
FLUSH_BYTES = 1 << 20  # in one go to Redis
READ_ENTRIES = 4  # of one read
TTL_TIMEOUTS = 6  # streams expire after so many progress timeouts without a renewal
GROUP, FIELD = "link", b"e"


@dataclass(frozen=True)
class LinkStreams:
    """Names of the two streams as one end sees them."""

    incoming: str
    outgoing: str


class RedisChannel:
    """A `FabricChannel` over Redis streams."""

    carrier = FabricTransport.REDIS

    def __init__(
        self,
        reader: PolledConnection,
        writer: PolledConnection,
        streams: LinkStreams,
        binding: bytes,
        ttl_ms: int,
    ) -> None:
        """Take over both open connections.

        Raises:
            BusUnavailableError
        """
        self.binding = binding
        self._reader, self._writer = reader, writer
        self._streams = streams
        self._ttl_ms = ttl_ms
        self._renewed_at = time.monotonic()
        self._send_seal, self._receive_seal = EntrySeal(), EntrySeal()
        self._waiting: list[bytes] = []  # entries that go out with the next flush
        self._num_waiting_bytes = 0
        self._num_sent = self._num_peer_took = 0  # bytes, as they are counted in Redis
        self._entries: deque[tuple[bytes, bytes]] = deque()  # read, by their ids
        self._current: tuple[bytes, int] | None = None  # id and cost of the entry that is being taken
        self._rest = memoryview(b"")  # of it
        self._is_ended = False
        self._gone: list[bytes] = []  # ids that are to be deleted
        self._num_taken = self._num_deleted = self._num_told = 0
        self._close_lock = threading.Lock()  # so that no `wake` writes to a file that came after ours
        self._is_closed = False
        self._read_next()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._reader_fd = reader.fileno()
        for fd in (self._wake, self._reader_fd, writer.fileno()):
            self._poll.register(fd, select.POLLIN)

    def protect(self, send_key: bytes, receive_key: bytes) -> None:
        """See `FabricChannel.protect`; requires the fabric's key."""
        if not send_key or not receive_key:
            raise ChannelError("a link through Redis needs the key of the fabric")
        if self._rest:
            raise ChannelError("the peer has said more than the handshake")
        self._send_seal.start(send_key)
        self._receive_seal.start(receive_key)

    def try_send(self, parts: Sequence[memoryview]) -> int:
        """See `FabricChannel.try_send`; each call makes one entry."""
        if not self._is_writable():
            return 0
        taken: list[memoryview] = []
        room = MAX_PAYLOAD_BYTES
        for part in parts:
            taken.append(part[:room])
            room -= len(taken[-1])
        num_bytes = MAX_PAYLOAD_BYTES - room
        self._add(EntryKind.BYTES, taken, num_bytes)
        return num_bytes

    def try_receive(self, into: memoryview) -> int:
        """See `FabricChannel.try_receive` for the contract."""
        while not self._rest:
            if self._entries:
                self._take(*self._entries.popleft())
            elif self._is_ended:
                raise ChannelClosedError("the peer closed the link")
            else:
                return 0
        num_bytes = min(len(into), len(self._rest))
        into[:num_bytes] = self._rest[:num_bytes]
        self._rest = self._rest[num_bytes:]
        if not self._rest:
            self._on_taken()
        return num_bytes

    def wait(self, timeout_s: float, *, writable: bool, num_bytes: int = 1) -> bool:
        """See `FabricChannel.wait`; flushes what was sent. Ignores `num_bytes`: entries arrive whole."""
        try:
            self._flush()
            if self._is_readable() or (writable and self._is_writable()):
                timeout_s = 0.0
            for fd, _ in self._poll.poll(max(0, int(timeout_s * 1000 + 0.999))):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif fd == self._reader_fd:
                    self._on_read(self._reader.read_replies())
                else:
                    self._writer.read_replies()  # a stream that the peer has deleted: its last entry comes
        except BusUnavailableError as error:
            raise link_lost(error) from error
        return self._is_readable()

    def wake(self) -> None:
        """See `FabricChannel.wake` for the contract."""
        with self._close_lock:
            if not self._is_closed:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """See `FabricChannel.close`; sent bytes are flushed as far as Redis takes them."""
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
        with contextlib.suppress(BusUnavailableError):
            self._reader.close()  # first: its read would be told that the stream is gone
            self._add(EntryKind.END, (), 0)
            self._gone.clear()
            self._flush()
            self._writer.send(
                [
                    ("UNLINK", self._streams.incoming),
                    ("PEXPIRE", self._streams.outgoing, self._ttl_ms // TTL_TIMEOUTS),
                ]
            )
            self._writer.read_all()
        self._writer.close()
        os.close(self._wake)

    # ---- what goes out ---------------------------------------------------------------------------
    def _is_writable(self) -> bool:
        room = WINDOW_BYTES - (self._num_sent - self._num_peer_took)
        return room >= cost_of(MAX_PAYLOAD_BYTES) and self._num_waiting_bytes < FLUSH_BYTES

    def _add(self, kind: EntryKind, parts: Sequence[memoryview], num_bytes: int) -> None:
        self._waiting.append(self._send_seal.pack(kind, self._num_deleted, parts))
        self._num_waiting_bytes += num_bytes
        self._num_sent += cost_of(num_bytes)
        self._num_told = self._num_deleted

    def _flush(self) -> None:
        commands: list[Command] = []
        if self._gone:
            commands.append(("XDEL", self._streams.incoming, *self._gone))
            self._gone = []
        self._num_deleted = self._num_taken
        if self._num_deleted - self._num_told >= WINDOW_BYTES // 4:
            self._add(EntryKind.BYTES, (), 0)
        outgoing = self._streams.outgoing
        commands += [("XADD", outgoing, "NOMKSTREAM", "*", FIELD, entry) for entry in self._waiting]
        self._waiting = []
        self._num_waiting_bytes = 0
        if (now := time.monotonic()) - self._renewed_at > self._ttl_ms / 1000 / TTL_TIMEOUTS:
            self._renewed_at = now
            commands += [
                ("PEXPIRE", key, self._ttl_ms) for key in (self._streams.incoming, self._streams.outgoing)
            ]
        if commands:
            self._writer.send(commands)

    # ---- what comes in ---------------------------------------------------------------------------
    def _is_readable(self) -> bool:
        return bool(self._rest) or bool(self._entries) or self._is_ended

    def _read_next(self) -> None:
        read = ("XREADGROUP", "GROUP", GROUP, GROUP, "NOACK", "COUNT", READ_ENTRIES, "BLOCK", 0)
        self._reader.send([(*read, "STREAMS", self._streams.incoming, ">")])

    def _on_read(self, replies: Sequence[Any]) -> None:
        for reply in replies:
            if reply is None:  # the streams have expired, or the peer was here before us, and closed
                self._is_ended = True
                return
            for entry_id, fields in reply[0][1]:
                if fields is None or len(fields) != 2 or fields[0] != FIELD:
                    raise ChannelError("an entry of the link's stream is not the peer's")
                self._entries.append((entry_id, fields[1]))
            if sum(len(data) for _, data in self._entries) > 2 * WINDOW_BYTES:
                raise ChannelError("more stands in the link's stream than may")
            self._read_next()

    def _take(self, entry_id: bytes, data: bytes) -> None:
        entry = self._receive_seal.unpack(data)
        if not self._num_peer_took <= entry.num_taken <= self._num_sent:
            raise ChannelError("the peer has taken what was not sent")
        self._num_peer_took = entry.num_taken
        self._is_ended = entry.kind is EntryKind.END
        self._current = (entry_id, cost_of(len(entry.payload)))
        self._rest = entry.payload
        if not self._rest:
            self._on_taken()

    def _on_taken(self) -> None:
        if self._current is not None:
            entry_id, cost = self._current
            self._gone.append(entry_id)
            self._num_taken += cost
            self._current = None


def link_lost(error: BusUnavailableError) -> ChannelError:
    """Channel error without an address, because gateways receive its text."""
    log.info("link through redis lost", error=str(error))
    if isinstance(error, BusRefusedError):
        return ChannelError(str(error))
    return ChannelClosedError("Redis was lost")
