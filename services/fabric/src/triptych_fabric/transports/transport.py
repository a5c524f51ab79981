"""Interface of a transport, and the chunks that wait to be sent on a link.

A `Transport` makes both ends of each link; ends belong to the connection's thread. The classes here are
those of TCP: chunks travel on the agents' own connection, plain or TLS. Other transports are subclasses.
Checksums are XXH3-128: an order of magnitude faster than the network; they detect accidents, not forgery.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import xxhash

from triptych_common.domain.errors import MalformedMessageError
from triptych_common.domain.fair_queue import FairKey, FairQueue
from triptych_common.protocol.messages import EncodeClass, FabricTransport
from triptych_fabric.wire.frames import (
    FROM_RECEIVER,
    FROM_SENDER,
    MAX_CHUNK_BYTES,
    NOTHING,
    Frame,
    FrameHeader,
    FrameKind,
    frame_header,
)

BURST_S = 0.05  # of the rate, that may be sent at once
NEVER_S = 3600.0


@dataclass(eq=False)
class Sending:
    """An accepted, sealed entry; `view` is valid until the offer is withdrawn and unread."""

    number: int
    view: memoryview
    encode_class: EncodeClass
    position: int = 0
    checksum: "xxhash.xxh3_128" = field(default_factory=xxhash.xxh3_128)


@dataclass(eq=False)
class Sink:
    """Blocks of one of this agent's reservations, for one entry: a `Place` in the region, and its bytes."""

    mm_hash: str
    generation: int
    offset: int
    view: memoryview
    position: int = 0
    checksum: "xxhash.xxh3_128" = field(default_factory=xxhash.xxh3_128)


class RateLimit:
    """Limit in bytes per second over all connections of an agent. Thread-safe."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0  # when what was taken has been paid for
        self._lock = threading.Lock()

    def pause_s(self, now: float) -> float:
        """Seconds to wait before anything may be sent."""
        return 0.0 if self._bytes_per_s is None else max(0.0, self._free_at - now - BURST_S)

    def take(self, num_bytes: int, now: float) -> None:
        if self._bytes_per_s is not None:
            with self._lock:
                self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s


class ChunkQueue:
    """Entries with bytes to send on one link, by offer number.

    A fair queue orders classes, and entries of one class, with bytes as the cost: a more urgent entry
    overtakes a long one at the next chunk, and entries of one class get equal shares.
    """

    def __init__(self, rate: RateLimit, on_began: Callable[[int], None]) -> None:
        """`on_began` is called with an offer's number before its first chunk."""
        self._rate = rate
        self._on_began = on_began
        self._fair_queue = FairQueue()
        self._sendings: dict[int, Sending] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._sendings

    def __len__(self) -> int:
        return len(self._sendings)

    def add(self, number: int, view: memoryview, encode_class: EncodeClass) -> None:
        self._sendings[number] = Sending(number, view, encode_class)

    def change_class(self, number: int, encode_class: EncodeClass) -> None:
        if (sending := self._sendings.get(number)) is not None:
            sending.encode_class = encode_class

    def remove(self, number: int) -> None:
        self._sendings.pop(number, None)

    def clear(self) -> None:
        self._sendings.clear()

    def next_chunk(self, now: float) -> tuple[Sending, memoryview] | float:
        """Take the next chunk with its entry; or the seconds until there may be one."""
        if not self._sendings:
            return NEVER_S
        if (pause_s := self._rate.pause_s(now)) > 0:
            return pause_s
        by_key = {FairKey(each.encode_class, str(each.number)): each for each in self._sendings.values()}
        key = self._fair_queue.next_key(by_key)
        sending = by_key[key]
        if sending.position == 0:
            self._on_began(sending.number)
        chunk = sending.view[sending.position : sending.position + MAX_CHUNK_BYTES]
        sending.position += len(chunk)
        self._fair_queue.take_slot(key, len(chunk), by_key)
        self._rate.take(len(chunk), now)
        return sending, chunk


class SenderLink(Protocol):
    """Link as its sender's end sees it; `end_entry` sends `END` with this body."""

    chunks: ChunkQueue

    def post_frame(self, frame: bytes) -> None: ...
    def end_entry(self, number: int, body: bytes) -> None: ...


class SenderEnd:
    """Sender's end of a link. As it stands, chunks travel on the connection; NIXL overrides that."""

    allowed = FROM_RECEIVER

    def __init__(self, link: SenderLink) -> None:
        self._link = link

    def open(self) -> bool:
        """Open after the handshake; False if the end is open once `REGION` came."""
        return True

    def on_region(self, body: bytes) -> None:
        """Connect to the region that the body of `REGION` describes."""

    def on_accepted(self, number: int, body: bytes) -> None:
        """Handle the body of `ACCEPTED`; raises MalformedMessageError."""
        if body:
            raise MalformedMessageError("an ACCEPTED with an address")

    def owes_end(self, number: int) -> bool:
        """True if the receiver still waits for `END` or `CANCEL` after it answered."""
        return False

    def cancel(self, number: int) -> bytes:
        """Stop sending the entry; returns the body of `CANCEL`."""
        return b""

    def step(self, now: float) -> float:
        """Send what goes past the connection; returns the seconds until the next call."""
        return NEVER_S

    def next_chunk(self, now: float) -> Frame:
        """Next `CHUNK` for the connection, after other frames."""
        found = self._link.chunks.next_chunk(now)
        if isinstance(found, float):
            return b"", NOTHING, found
        sending, chunk = found
        sending.checksum.update(chunk)
        if sending.position == len(sending.view):
            self._link.end_entry(sending.number, sending.checksum.digest())
        return frame_header(FrameKind.CHUNK, sending.number, len(chunk)), chunk, 0.0

    def when_unread(self, number: int, on_gone: Callable[[], object]) -> None:
        """Call `on_gone` when nothing of the offer is read any more."""
        on_gone()

    def close(self) -> None:
        """Close; memory is not read afterwards."""


class ReceiverLink(Protocol):
    """Link as its receiver's end sees it.

    `sink_of` is None for an offer that has ended, and raises MalformedMessageError for one that was not
    accepted. `is_still_ours` fails the offer if its reservation is lost. `end_entry` compares the checksum.
    """

    def sink_of(self, number: int) -> Sink | None: ...
    def is_still_ours(self, number: int, sink: Sink) -> bool: ...
    def end_entry(self, number: int, sink: Sink, digest: bytes) -> None: ...


class ReceiverEnd:
    """Receiver's end of a link; `on_...` raise MalformedMessageError. As `SenderEnd`, NIXL overrides it."""

    allowed = FROM_SENDER
    _number: int | None = None  # offer whose chunk is being read into its sink
    _dropped = NOTHING  # takes bytes of offers that have ended

    def __init__(self, link: ReceiverLink) -> None:
        self._link = link

    def open(self) -> bytes:
        """Open after the handshake; returns the body of `REGION`, empty if none is sent."""
        return b""

    def accept(self, number: int, sink: Sink) -> bytes:
        """Let the sender write into `sink`; returns the body of `ACCEPTED`."""
        return b""

    def on_header(self, header: FrameHeader) -> memoryview | None:
        """Destination of a chunk's body."""
        if header.kind is not FrameKind.CHUNK:
            return None
        sink, num_bytes = self._link.sink_of(header.number), header.body_num_bytes
        if sink is not None and num_bytes > len(sink.view) - sink.position:
            raise MalformedMessageError("more bytes than the entry has")
        if sink is None or not self._link.is_still_ours(header.number, sink):
            return self._scratch(num_bytes)
        self._number = header.number
        return sink.view[sink.position : sink.position + num_bytes]

    def place_of_rest(self, rest: memoryview) -> memoryview:
        """Destination of the rest of a chunk: `rest`, or a view of that size."""
        if self._number is None:
            return rest
        sink = self._link.sink_of(self._number)
        if sink is not None and self._link.is_still_ours(self._number, sink):
            return rest
        self._number = None
        return self._scratch(len(rest))

    def on_frame(self, header: FrameHeader, body: bytes) -> None:
        """Handle a frame that is neither `OFFER` nor `CANCEL`."""
        self._number = None
        sink = self._link.sink_of(header.number)
        if sink is None:
            return
        if header.kind is FrameKind.CHUNK:
            begin, sink.position = sink.position, sink.position + header.body_num_bytes
            sink.checksum.update(sink.view[begin : sink.position])
        else:
            self._link.end_entry(header.number, sink, body)

    def on_cancel(self, number: int, body: bytes) -> None:
        """Handle the body of `CANCEL`."""
        if body:
            raise MalformedMessageError("a CANCEL with a count")

    def step(self, now: float) -> float:
        """Receive what comes past the connection; returns the seconds until the next call."""
        return NEVER_S

    def when_unwritten(self, number: int, on_gone: Callable[[], object]) -> None:
        """Call `on_gone` when nothing is written for the offer any more."""
        on_gone()

    def close(self) -> None:
        """Close; memory is not written afterwards."""

    def _scratch(self, num_bytes: int) -> memoryview:
        if not self._dropped:
            self._dropped = memoryview(bytearray(MAX_CHUNK_BYTES))
        return self._dropped[:num_bytes]


class Transport:
    """A way for bytes of entries; an agent has one object for all links. This one is TCP, plain or TLS."""

    kind = FabricTransport.TCP

    def sender_end(self, link: SenderLink) -> SenderEnd:
        return SenderEnd(link)

    def receiver_end(self, link: ReceiverLink) -> ReceiverEnd:
        return ReceiverEnd(link)
