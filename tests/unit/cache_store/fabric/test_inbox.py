"""What a target's connection keeps of offers, however its peer behaves."""

import asyncio
from typing import Any, cast

import pytest

from triptych_cache_store.fabric.target.inbox import MAX_UNREAD_FRAMES, EntryInbox
from triptych_cache_store.fabric.wire.frames import (
    MAX_LIVE_OFFERS,
    FrameHeader,
    FrameKind,
    Offer,
    OfferFailed,
)
from triptych_common.domain.errors import MalformedMessageError
from triptych_common.protocol.messages import EncodeClass
from triptych_common.protocol.store import TensorSpec
from triptych_common.protocol.transfers import TransferFailureKind

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
        self.inbox = EntryInbox(
            cast(Any, None), cast(Any, self.events), cast(Any, None), asyncio.get_running_loop()
        )

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
    assert bench.events.names == ["on_offer"] * 3 + ["on_withdrawn"] * 2


async def test_answers_that_nobody_reads_are_bounded() -> None:
    bench = Inbox()
    for number in range(1, MAX_UNREAD_FRAMES + 1):
        bench.send(FrameKind.OFFER, number, BODY)
        bench.inbox.answer(number, FrameKind.PRESENT)
    with pytest.raises(MalformedMessageError, match="without reading"):
        bench.send(FrameKind.OFFER, MAX_UNREAD_FRAMES + 1, BODY)
    assert len(bench.sent()) == MAX_UNREAD_FRAMES
