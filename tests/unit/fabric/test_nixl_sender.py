"""A source on a link of NIXL: every accepted offer ends with END or CANCEL, which count its chunks."""

import asyncio
import struct
from collections.abc import Callable
from typing import Any, cast

import pytest

from triptych_common.domain.errors import MalformedMessageError
from triptych_common.protocol.messages import EncodeClass
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_fabric.sender.link import EntryOutbox
from triptych_fabric.transports.nixl import WRITES_AT_ONCE, NixlTransport
from triptych_fabric.transports.transport import RateLimit
from triptych_fabric.wire.channel import PeerSilentError
from triptych_fabric.wire.frames import (
    ADDRESS,
    COUNT,
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    NOTE,
    FrameHeader,
    FrameKind,
    OfferFailed,
    json_frame,
    unpack,
)

AT = 1 << 40
FAILED = json_frame(FrameKind.FAILED, 1, OfferFailed(kind=TransferFailureKind.EXPIRED))[HEADER_BYTES:]


class Memory:
    """Notes of writes that were begun; `is_done`: they are over."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, int, int]] = []  # address, number, bytes
        self.is_done = True
        self.is_closed = False

    def connect(self, metadata: bytes) -> None:
        assert metadata == b"region"

    def start_write(self, view: memoryview, address: int, note: bytes) -> object:
        number, num_bytes = unpack(NOTE, note)
        assert num_bytes == len(view)
        self.writes.append((address, number, num_bytes))
        return object()

    def is_over(self, write: object) -> bool:
        return self.is_done

    def close(self) -> None:
        self.is_closed = True


class Source:
    """An outbox with an offer, number 1."""

    def __init__(self, *, has_region: bool = True) -> None:
        self.memory = Memory()
        self.events: list[str] = []
        self.gone: list[int] = []

        self.outbox = EntryOutbox(
            lambda channel: None,
            cast(Any, Events(self.events)),
            RateLimit(None),
            asyncio.get_running_loop(),
            NixlTransport(cast(Any, None), 5.0, lambda mapping: cast(Any, self.memory)),
        )
        self.outbox.begin(cast(Any, None))
        if has_region:
            self.receive(FrameKind.REGION, b"region", number=0)
        self.outbox.offer(1, b"")
        self.outbox.next_frame(0.0)

    def receive(self, kind: FrameKind, body: bytes = b"", number: int = 1) -> None:
        header = FrameHeader(kind, number, len(body))
        self.outbox.on_header(header)
        self.outbox.on_frame(header, body)

    def accepted(self, num_bytes: int) -> None:
        self.receive(FrameKind.ACCEPTED, ADDRESS.pack(AT))
        self.outbox.send(1, memoryview(bytearray(num_bytes)), EncodeClass.INTERACTIVE)

    def frames(self, now: float = 0.0) -> list[tuple[FrameKind, bytes]]:
        found = []
        while frame := self.outbox.next_frame(now)[0]:
            kind = struct.unpack(">B", frame[:1])[0]
            found.append((FrameKind(kind), frame[HEADER_BYTES:]))
        return found

    async def withdraw(self) -> None:
        self.outbox.withdraw(1, lambda: self.gone.append(1))
        await asyncio.sleep(0)


class Events:
    """Names of what the event loop hears."""

    def __init__(self, heard: list[str]) -> None:
        self._heard = heard

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self._heard.append(name)


async def test_pieces_are_written_where_the_target_said() -> None:
    source = Source()
    source.accepted(2 * MAX_CHUNK_BYTES + 10)
    frames = source.frames()
    assert [kind for kind, _ in frames] == [FrameKind.WRITING, FrameKind.END]
    assert source.memory.writes == [
        (AT, 1, MAX_CHUNK_BYTES),
        (AT + MAX_CHUNK_BYTES, 1, MAX_CHUNK_BYTES),
        (AT + 2 * MAX_CHUNK_BYTES, 1, 10),
    ]
    assert unpack(COUNT, frames[-1][1][16:])[0] == 3


async def test_writes_under_way_are_bounded_and_their_bytes_stay() -> None:
    source = Source()
    source.memory.is_done = False
    source.accepted(10 * MAX_CHUNK_BYTES)
    assert [kind for kind, _ in source.frames()] == [FrameKind.WRITING]
    assert len(source.memory.writes) == WRITES_AT_ONCE
    await source.withdraw()
    assert source.gone == [], "NIXL still reads them"
    ((kind, body),) = source.frames()
    assert (kind, unpack(COUNT, body)[0]) == (FrameKind.CANCEL, WRITES_AT_ONCE)
    source.memory.is_done = True
    source.frames()
    await asyncio.sleep(0)
    assert source.gone == [1]


async def test_an_offer_that_the_target_has_failed_is_ended_by_the_source() -> None:
    """The target waits to hear that no more is written."""
    source = Source()
    source.receive(FrameKind.ACCEPTED, ADDRESS.pack(AT))
    source.receive(FrameKind.FAILED, FAILED)
    ((kind, body),) = source.frames()
    assert (kind, unpack(COUNT, body)[0]) == (FrameKind.CANCEL, 0)
    await source.withdraw()
    assert source.frames() == [], "once"


async def test_an_offer_that_is_withdrawn_before_its_answer_counts_nothing() -> None:
    source = Source()
    await source.withdraw()
    ((kind, body),) = source.frames()
    assert (kind, unpack(COUNT, body)[0]) == (FrameKind.CANCEL, 0)
    source.receive(FrameKind.ACCEPTED, ADDRESS.pack(AT))
    assert source.frames() == []


async def test_a_write_that_does_not_end_ends_the_link() -> None:
    source = Source()
    source.memory.is_done = False
    source.accepted(10)
    source.frames(100.0)
    with pytest.raises(PeerSilentError):
        source.outbox.next_frame(106.0)
    source.outbox.on_end(None)
    assert source.memory.is_closed


async def test_the_link_is_open_once_the_target_has_shown_its_region_and_that_comes_once() -> None:
    """A target whose NIXL fails never does: its link is not counted as open."""
    source = Source()
    await asyncio.sleep(0)
    assert source.events == ["on_open"]
    with pytest.raises(MalformedMessageError):
        source.receive(FrameKind.REGION, b"region", number=0)
    unanswered = Source(has_region=False)
    await asyncio.sleep(0)
    assert unanswered.events == []
