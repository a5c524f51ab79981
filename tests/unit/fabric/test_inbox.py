"""What a target's connection keeps of offers, however its peer behaves."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from triptych_common.domain.errors import MalformedMessageError, StoreError
from triptych_common.protocol.messages import EncodeClass, FabricTransport
from triptych_common.protocol.store import TensorSpec
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_fabric.receiver import peer as peer_module
from triptych_fabric.receiver.peer import MAX_UNREAD_FRAMES, EntryInbox
from triptych_fabric.transports.transport import Sink, Transport
from triptych_fabric.wire.frames import MAX_LIVE_OFFERS, FrameHeader, FrameKind, Offer, OfferFailed
from triptych_fabric.wire.handshake import Admitted

BODY = (
    Offer(
        mm_hash="ab" * 32,
        spec=TensorSpec(shape=(1, 2), dtype="float32", num_bytes=8),
        is_sealed=True,
        encode_class=EncodeClass.BATCH,
        remaining_ms=1000,
    )
    .model_dump_json()
    .encode()
)
MAPPING = cast(Any, SimpleNamespace(layout=None))  # of a plain file: each reservation counts
FAILURE = OfferFailed(kind=TransferFailureKind.UNREACHABLE)


class Events:
    """Names of what the event loop was told."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.names.append(name)


class Inbox:
    """An inbox, and frames to it."""

    def __init__(self) -> None:
        self.events = Events()
        loop = asyncio.get_running_loop()
        nothing = cast(Any, None)
        events = cast(Any, self.events)
        self.inbox = EntryInbox(nothing, events, MAPPING, loop, lambda kind: Transport())
        self.inbox.open(Admitted("store-a", 1, FabricTransport.TCP))

    def send(self, kind: FrameKind, number: int, body: bytes = b"") -> None:
        header = FrameHeader(kind, number, len(body))
        self.inbox.on_header(header)
        self.inbox.on_frame(header, body)

    def sent(self) -> list[FrameKind]:
        kinds = []
        while frame := self.inbox.next_frame(0.0)[0]:
            kinds.append(FrameKind(frame[0]))
        return kinds


async def test_offers_that_are_cancelled_count_until_the_loop_has_ended_them() -> None:
    bench = Inbox()
    for number in range(1, MAX_LIVE_OFFERS + 1):
        bench.send(FrameKind.OFFER, number, BODY)
        bench.send(FrameKind.CANCEL, number)
    with pytest.raises(MalformedMessageError):
        bench.send(FrameKind.OFFER, MAX_LIVE_OFFERS + 1, BODY)
    bench.inbox.drop(1, FAILURE, lambda: None)
    bench.send(FrameKind.OFFER, MAX_LIVE_OFFERS + 2, BODY)


async def test_who_withdrew_an_offer_hears_nothing_of_it() -> None:
    bench = Inbox()
    for number in (1, 2, 3):
        bench.send(FrameKind.OFFER, number, BODY)
    bench.send(FrameKind.CANCEL, 1)
    bench.send(FrameKind.CANCEL, 1)
    bench.send(FrameKind.CANCEL, 2)
    bench.inbox.drop(1, FAILURE, lambda: None)
    bench.inbox.answer(2, FrameKind.PRESENT)
    bench.inbox.drop(3, FAILURE, lambda: None)
    assert bench.sent() == [FrameKind.FAILED]
    await asyncio.sleep(0)
    assert bench.events.names == ["on_admitted"] + ["on_offer"] * 3 + ["on_withdrawn"] * 2


async def test_answers_that_nobody_reads_are_bounded() -> None:
    bench = Inbox()
    for number in range(1, MAX_UNREAD_FRAMES + 1):
        bench.send(FrameKind.OFFER, number, BODY)
        bench.inbox.answer(number, FrameKind.PRESENT)
    with pytest.raises(MalformedMessageError, match="without reading"):
        bench.send(FrameKind.OFFER, MAX_UNREAD_FRAMES + 1, BODY)
    assert len(bench.sent()) == MAX_UNREAD_FRAMES


@pytest.fixture
async def half_chunk() -> tuple[Inbox, memoryview]:
    """A chunk is on its way into an entry's blocks; the blocks."""
    bench, blocks = Inbox(), memoryview(bytearray(8))
    bench.send(FrameKind.OFFER, 1, BODY)
    bench.inbox.accept(1, Sink("ab" * 32, 1, 0, blocks))
    assert bench.sent() == [FrameKind.ACCEPTED]
    place = bench.inbox.on_header(FrameHeader(FrameKind.CHUNK, 1, 8))
    assert place is not None
    place[:4] = b"abcd"
    return bench, blocks


def send_rest(bench: Inbox, blocks: memoryview) -> None:
    rest = bench.inbox.place_of_rest(blocks[4:])
    assert len(rest) == 4
    rest[:] = b"efgh"
    bench.inbox.on_frame(FrameHeader(FrameKind.CHUNK, 1, 8), b"")


async def test_the_rest_of_a_chunk_of_an_offer_that_has_ended_is_dropped(
    half_chunk: tuple[Inbox, memoryview],
) -> None:
    bench, blocks = half_chunk
    gone = asyncio.Event()
    bench.inbox.drop(1, FAILURE, gone.set)
    await asyncio.wait_for(gone.wait(), 60.0)
    send_rest(bench, blocks)
    assert bytes(blocks) == b"abcd" + bytes(4)


async def test_the_rest_of_a_chunk_does_not_go_into_a_reservation_that_was_lost(
    half_chunk: tuple[Inbox, memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*args: object) -> None:
        raise StoreError("stale_reservation", "lost")

    bench, blocks = half_chunk
    monkeypatch.setattr(peer_module, "check_reservation", lost)
    send_rest(bench, blocks)
    assert bytes(blocks) == b"abcd" + bytes(4)
    await asyncio.sleep(0)
    assert bench.events.names[-1] == "on_received"
