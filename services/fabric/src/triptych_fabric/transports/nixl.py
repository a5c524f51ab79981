"""Transport NIXL: the sender writes chunks into the receiver's region, past the agents' connection.

Several writes are in flight; each notifies the receiver when it is complete there. An offer is open from its
`ACCEPTED` until the sender has sent the number of chunks written, by `END` or `CANCEL`, and all
notifications have come: then nothing is written for it any more, and its blocks may be reused. If the count
never comes, the link ends, and NIXL's agent with it, before any block is given back.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych_common.domain.errors import MalformedMessageError
from triptych_common.protocol.messages import FabricTransport
from triptych_common.region.mapping import RegionMapping
from triptych_common.telemetry.logs import get_logger
from triptych_fabric.transports.nixl_memory import NixlError, NixlMemory, NixlWrite, load_nixl
from triptych_fabric.transports.transport import (
    NEVER_S,
    ReceiverEnd,
    ReceiverLink,
    SenderEnd,
    SenderLink,
    Sending,
    Sink,
    Transport,
)
from triptych_fabric.wire.channel import PeerSilentError
from triptych_fabric.wire.frames import (
    ADDRESS,
    COUNT,
    DIGEST_BYTES,
    FROM_RECEIVER_OF_NIXL,
    FROM_SENDER_OF_NIXL,
    NOTE,
    NOTHING,
    Frame,
    FrameHeader,
    FrameKind,
    short_frame,
    unpack,
)

log = get_logger(__name__)

WRITES_AT_ONCE = 4
SPIN_S = 0.02  # NIXL is polled without a pause for that long after its last progress
SLOW_PAUSE_S = 0.001
OpenMemory = Callable[[RegionMapping], NixlMemory]


class NixlTransport(Transport):
    """NIXL over UCX, for the region of one mapping."""

    kind = FabricTransport.NIXL

    def __init__(
        self, mapping: RegionMapping, progress_timeout_s: float, open_memory: OpenMemory = NixlMemory.open
    ) -> None:
        self.mapping = mapping
        self.progress_timeout_s = progress_timeout_s
        self.open_memory = open_memory

    def sender_end(self, link: SenderLink) -> SenderEnd:
        return NixlSenderEnd(link, self)

    def receiver_end(self, link: ReceiverLink) -> ReceiverEnd:
        return NixlReceiverEnd(link, self)


def usable_transports(
    wanted: Sequence[FabricTransport], listen_host: str = ""
) -> tuple[FabricTransport, ...]:
    """Wanted transports that work on this machine.

    Args:
        listen_host: of the agent; on a loopback address UCX, too, listens on the loopback interface alone.

    Raises:
        NixlError: none of them.
    """
    usable = list(wanted)
    if FabricTransport.NIXL in usable:
        if listen_host == "localhost" or listen_host.startswith(("127.", "::1")):
            # UCX has no other configuration than its environment, and by default listens on all interfaces.
            os.environ.setdefault("UCX_NET_DEVICES", "lo")  # noqa: TID251
        try:
            load_nixl()  # here, not in the thread of the first link: it takes seconds
        except NixlError as error:
            usable.remove(FabricTransport.NIXL)
            if not usable:
                raise
            log.warning("nixl cannot be used, entries go by the other transports", error=str(error))
    return tuple(usable)


class _Progress:
    """Polls NIXL, which has no wake-up, and notices when it is stuck."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._moved_at = 0.0

    def moved(self, now: float) -> None:
        self._moved_at = now

    def pause_s(self, now: float, *, is_awaited: bool = True) -> float:
        """Seconds until NIXL is polled again; raises PeerSilentError if it is stuck."""
        silent_s = now - self._moved_at
        if is_awaited and silent_s > self._timeout_s:
            raise PeerSilentError(f"NIXL moved nothing for {self._timeout_s:g} s")
        return 0.0 if silent_s < SPIN_S else SLOW_PAUSE_S


@dataclass
class AcceptedOffer:
    """Offer whose `END` or `CANCEL` is due."""

    address: int  # in the receiver's process
    num_chunks: int = 0  # that were written


class NixlSenderEnd(SenderEnd):
    allowed = FROM_RECEIVER_OF_NIXL

    def __init__(self, link: SenderLink, transport: NixlTransport) -> None:
        super().__init__(link)
        self._transport = transport
        self._memory: NixlMemory | None = None
        self._is_connected = False
        self._accepted: dict[int, AcceptedOffer] = {}
        self._writing: deque[tuple[int, NixlWrite]] = deque()  # with the numbers of their offers
        self._num_writing: Counter[int] = Counter()
        self._gone: dict[int, Callable[[], object]] = {}  # callbacks that wait for the writes of an offer
        self._progress = _Progress(transport.progress_timeout_s)

    def open(self) -> bool:
        self._memory = self._transport.open_memory(self._transport.mapping)
        return False

    def on_region(self, body: bytes) -> None:
        if self._memory is None or self._is_connected:
            raise MalformedMessageError("a second region")
        self._memory.connect(body)
        self._is_connected = True

    def on_accepted(self, number: int, body: bytes) -> None:
        self._accepted[number] = AcceptedOffer(unpack(ADDRESS, body)[0])

    def owes_end(self, number: int) -> bool:
        return number in self._accepted

    def cancel(self, number: int) -> bytes:
        accepted = self._accepted.pop(number, None)
        return COUNT.pack(0 if accepted is None else accepted.num_chunks)

    def step(self, now: float) -> float:
        """Complete finished writes and start others.

        Raises:
            PeerSilentError: a write makes no progress.
            NixlError
        """
        if self._memory is None or not self._is_connected:
            return NEVER_S
        self._complete_writes(self._memory, now)
        pause_s = self._progress.pause_s(now) if self._writing else NEVER_S
        while len(self._writing) < WRITES_AT_ONCE:
            found = self._link.chunks.next_chunk(now)
            if isinstance(found, float):
                return min(pause_s, found)
            self._start_write(self._memory, *found)
            pause_s = 0.0
        return pause_s

    def next_chunk(self, now: float) -> Frame:
        return b"", NOTHING, NEVER_S

    def when_unread(self, number: int, on_gone: Callable[[], object]) -> None:
        if self._num_writing[number]:
            self._gone[number] = on_gone
        else:
            on_gone()

    def close(self) -> None:
        self._writing.clear()
        if self._memory is not None:
            self._memory.close()

    def _complete_writes(self, memory: NixlMemory, now: float) -> None:
        if not self._writing:
            self._progress.moved(now)
        while self._writing and memory.is_over(self._writing[0][1]):
            number, _ = self._writing.popleft()
            self._progress.moved(now)
            self._num_writing[number] -= 1
            if not self._num_writing[number]:
                del self._num_writing[number]
                if (on_gone := self._gone.pop(number, None)) is not None:
                    on_gone()

    def _start_write(self, memory: NixlMemory, sending: Sending, chunk: memoryview) -> None:
        number, accepted = sending.number, self._accepted[sending.number]
        if not accepted.num_chunks:
            self._link.post_frame(short_frame(FrameKind.WRITING, number))
        begin = sending.position - len(chunk)
        write = memory.start_write(chunk, accepted.address + begin, NOTE.pack(number, len(chunk)))
        self._writing.append((number, write))
        self._num_writing[number] += 1
        accepted.num_chunks += 1
        sending.checksum.update(chunk)
        if sending.position == len(sending.view):
            del self._accepted[number]
            self._link.end_entry(number, sending.checksum.digest() + COUNT.pack(accepted.num_chunks))


@dataclass
class OpenOffer:
    sink: Sink
    is_begun: bool = False
    num_written: int = 0  # bytes
    num_chunks: int = 0
    total_chunks: int | None = None  # as the sender counted
    digest: bytes | None = None
    on_gone: Callable[[], object] | None = None


class NixlReceiverEnd(ReceiverEnd):
    allowed = FROM_SENDER_OF_NIXL

    def __init__(self, link: ReceiverLink, transport: NixlTransport) -> None:
        super().__init__(link)
        self._memory = transport.open_memory(transport.mapping)
        self._open: dict[int, OpenOffer] = {}
        self._progress = _Progress(transport.progress_timeout_s)

    def open(self) -> bytes:
        return self._memory.metadata()

    def accept(self, number: int, sink: Sink) -> bytes:
        self._open[number] = OpenOffer(sink)
        return ADDRESS.pack(self._memory.address_of(sink.offset))

    def on_frame(self, header: FrameHeader, body: bytes) -> None:
        """Handle `WRITING` or `END`; the offer may have ended here meanwhile."""
        number = header.number
        self._link.sink_of(number)
        if header.kind is FrameKind.END:
            self._end(number, unpack(COUNT, body[DIGEST_BYTES:])[0], body[:DIGEST_BYTES])
            return
        if (offer := self._open.get(number)) is not None:
            offer.is_begun = True
            self._progress.moved(time.monotonic())

    def on_cancel(self, number: int, body: bytes) -> None:
        self._end(number, unpack(COUNT, body)[0], None)

    def step(self, now: float) -> float:
        """Process notifications.

        Raises:
            MalformedMessageError: a notification that the offer does not allow.
            PeerSilentError: announced chunks do not come.
            NixlError
        """
        if not any(offer.is_begun or offer.total_chunks for offer in self._open.values()):
            return NEVER_S
        for note in self._memory.take_notes():
            self._progress.moved(now)
            number, num_bytes = unpack(NOTE, note)
            offer = self._open.get(number)
            if offer is None:
                raise MalformedMessageError("a chunk of an offer that is not open")
            offer.num_chunks += 1
            offer.num_written += num_bytes
            if offer.num_written > len(offer.sink.view):
                raise MalformedMessageError("more bytes than the entry has")
            self._close_if_over(number, offer)
        is_awaited = any(each.total_chunks for each in self._open.values())
        return self._progress.pause_s(now, is_awaited=is_awaited)

    def when_unwritten(self, number: int, on_gone: Callable[[], object]) -> None:
        if (offer := self._open.get(number)) is not None:
            offer.on_gone = on_gone
        else:
            on_gone()

    def close(self) -> None:
        self._open.clear()
        self._memory.close()

    def _end(self, number: int, total_chunks: int, digest: bytes | None) -> None:
        """Record the sender's final count; repeated calls have no effect."""
        offer = self._open.get(number)
        if offer is not None and offer.total_chunks is None:
            offer.total_chunks, offer.digest = total_chunks, digest
            self._progress.moved(time.monotonic())
            self._close_if_over(number, offer)

    def _close_if_over(self, number: int, offer: OpenOffer) -> None:
        if offer.total_chunks is None or offer.num_chunks < offer.total_chunks:
            return
        if offer.num_chunks > offer.total_chunks:
            raise MalformedMessageError("more chunks than the sender has counted")
        sink = offer.sink
        if offer.digest is not None and offer.num_written != len(sink.view):
            raise MalformedMessageError("fewer bytes than the entry has")
        del self._open[number]
        is_live = offer.digest is not None and self._link.sink_of(number) is sink
        if offer.digest is not None and is_live and self._link.is_still_ours(number, sink):
            sink.checksum.update(sink.view)
            sink.position = len(sink.view)
            self._link.end_entry(number, sink, offer.digest)
        if offer.on_gone is not None:
            offer.on_gone()
