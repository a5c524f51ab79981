"""When blocks that NIXL writes to may be given back: never while a write can be under way."""

import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from triptych_common.domain.errors import MalformedMessageError
from triptych_fabric.transports.nixl import NixlReceiverEnd, NixlTransport
from triptych_fabric.transports.transport import NEVER_S, Sink
from triptych_fabric.wire.channel import PeerSilentError
from triptych_fabric.wire.frames import ADDRESS, COUNT, NOTE, FrameHeader, FrameKind

DIGEST = b"d" * 16


class Memory:
    """Notes that are to come; nothing is written."""

    def __init__(self) -> None:
        self.notes: list[bytes] = []
        self.is_closed = False

    def address_of(self, offset: int) -> int:
        return 1000 + offset

    def take_notes(self) -> list[bytes]:
        notes, self.notes = self.notes, []
        return notes

    def close(self) -> None:
        self.is_closed = True


class Bench:
    """An offer of 8 bytes, accepted, and the link's calls about it."""

    def __init__(self, *, is_begun: bool = True) -> None:
        self.memory = Memory()
        self.heard: list[object] = []
        self.sink = Sink("ab" * 32, 1, 24, memoryview(bytearray(8)))
        self.is_live = True
        transport = NixlTransport(cast(Any, None), 5.0, lambda mapping: cast(Any, self.memory))
        self.chunks = NixlReceiverEnd(self, transport)
        assert self.chunks.accept(1, self.sink) == ADDRESS.pack(1024)
        if is_begun:
            self.chunks.on_frame(FrameHeader(FrameKind.WRITING, 1, 0), b"")

    # ---- the link --------------------------------------------------------------------------------
    def sink_of(self, number: int) -> Sink | None:
        return self.sink if self.is_live else None

    def is_still_ours(self, number: int, sink: Sink) -> bool:
        return True

    def end_entry(self, number: int, sink: Sink, digest: bytes) -> None:
        assert sink.position == 8
        self.heard.append(digest)

    # ---- frames and notifications ----------------------------------------------------------------
    def end(self, total: int, digest: bytes | None) -> None:
        if digest is None:
            self.chunks.on_cancel(1, COUNT.pack(total))
        else:
            body = digest + COUNT.pack(total)
            self.chunks.on_frame(FrameHeader(FrameKind.END, 1, len(body)), body)

    def note(self, number: int, num_bytes: int) -> None:
        self.memory.notes.append(NOTE.pack(number, num_bytes))
        self.chunks.step(0.0)

    def gone(self) -> Callable[[], None]:
        return lambda: self.heard.append("gone")


@pytest.mark.parametrize("is_end_first", [True, False])
def test_an_entry_is_there_when_all_pieces_and_the_end_are(is_end_first: bool) -> None:
    bench = Bench()
    bench.note(1, 4)
    if is_end_first:
        bench.end(2, DIGEST)
        assert bench.heard == []
        bench.note(1, 4)
    else:
        bench.note(1, 4)
        assert bench.heard == []
        bench.end(2, DIGEST)
    assert bench.heard == [DIGEST]
    assert bench.chunks.step(0.0) == NEVER_S, "nothing more is to come"


def test_blocks_are_not_given_back_before_the_source_has_ended() -> None:
    bench = Bench()
    bench.note(1, 4)
    bench.chunks.when_unwritten(1, bench.gone())
    assert bench.heard == [], "the source may write on"
    bench.end(2, None)
    assert bench.heard == [], "one of its writes is under way"
    bench.note(1, 4)
    assert bench.heard == ["gone"]


def test_an_offer_that_was_never_written_to_ends_with_its_cancel() -> None:
    bench = Bench()
    bench.chunks.when_unwritten(1, bench.gone())
    bench.end(0, None)
    assert bench.heard == ["gone"]
    bench.chunks.when_unwritten(1, bench.gone())
    assert bench.heard == ["gone", "gone"]


def test_an_end_and_then_a_cancel_is_the_end() -> None:
    bench = Bench()
    bench.end(1, DIGEST)
    bench.end(0, None)
    bench.note(1, 8)
    assert bench.heard == [DIGEST]


def test_nothing_is_asked_for_while_nobody_writes() -> None:
    bench = Bench(is_begun=False)
    bench.memory.notes.append(b"not to be read")
    assert bench.chunks.step(0.0) == NEVER_S


def test_an_entry_of_an_offer_that_has_ended_is_not_stored() -> None:
    bench = Bench()
    bench.note(1, 8)
    bench.is_live = False
    bench.chunks.when_unwritten(1, bench.gone())
    bench.end(1, DIGEST)
    assert bench.heard == ["gone"]


def test_what_the_source_has_written_and_does_not_come_ends_the_link() -> None:
    """Only then: a source may write as slowly as it likes."""
    bench = Bench()
    bench.note(1, 4)
    bench.chunks.step(time.monotonic() + 60.0)
    bench.end(2, DIGEST)
    bench.chunks.step(time.monotonic() + 4.0)
    with pytest.raises(PeerSilentError):
        bench.chunks.step(time.monotonic() + 6.0)


@pytest.mark.parametrize(
    "notes", [[(2, 4)], [(1, 9)], [(1, 4), (1, 5)]], ids=["not open", "too large", "too much"]
)
def test_writes_that_were_not_to_come_end_the_link(notes: list[tuple[int, int]]) -> None:
    bench = Bench()
    bench.memory.notes = [NOTE.pack(*note) for note in notes]
    with pytest.raises(MalformedMessageError):
        bench.chunks.step(0.0)


def test_a_note_that_is_none_ends_the_link() -> None:
    bench = Bench()
    bench.memory.notes = [b"hello"]
    with pytest.raises(MalformedMessageError):
        bench.chunks.step(0.0)


@pytest.mark.parametrize(("total", "digest"), [(1, None), (2, DIGEST)])
def test_counts_that_do_not_fit_end_the_link(total: int, digest: bytes | None) -> None:
    """More chunks than were counted; or fewer bytes than the entry has."""
    bench = Bench()
    bench.note(1, 2)
    bench.note(1, 2)
    with pytest.raises(MalformedMessageError):
        bench.end(total, digest)


def test_the_end_of_the_link_ends_all_writes() -> None:
    bench = Bench()
    bench.chunks.close()
    assert bench.memory.is_closed
    bench.chunks.when_unwritten(1, bench.gone())
    assert bench.heard == ["gone"]
