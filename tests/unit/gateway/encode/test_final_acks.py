"""Whom the gateway tells that a request of its own needs nothing any more."""

import asyncio
from typing import Any, cast

import pytest

from triptych_common.bus import AsyncBus
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.ids import RequestId
from triptych_common.protocol.messages import EncoderCacheMetadata, ItemAck, Modality, Outcome, Requester
from triptych_common.protocol.names import StreamNames
from triptych_gateway.encode.final_acks import FinalAcks
from triptych_gateway.encode.media_wait import MediaWait

LIMIT_S = 5.0


class FakeBus:
    """Keeps what was published; `is_away` once."""

    names = StreamNames("test")

    def __init__(self) -> None:
        self.said: asyncio.Queue[tuple[str, ItemAck]] = asyncio.Queue()
        self.is_away = False

    async def publish(self, stream: str, message: ItemAck) -> str:
        if self.is_away:
            self.is_away = False
            raise BusUnavailableError("away")
        await self.said.put((stream, message))
        return "1-1"


def metadata(
    *request_ids: str, encoder: str = "encoder-0", gateway: str = "gateway-0"
) -> EncoderCacheMetadata:
    return EncoderCacheMetadata(
        job_id="job-1", mm_hash="ab" * 32, modality=Modality.IMAGE, num_embeds=1, width=4, dtype="float32",
        num_bytes=16, placeholder_metadata={}, encoder=encoder, store="store-0", sealed=False,
        requesters=tuple(
            Requester(request_id=each, item_index=0, gateway=gateway, prefill_decode="pd-0")
            for each in request_ids
        ),
    )  # fmt: skip


def ticket(request_id: str) -> MediaWait:
    return MediaWait(
        RequestId(request_id), "pd-0", (), deadline=0.0, traceparent=None, namespace_digest="d" * 64
    )


async def heard(bus: FakeBus, words: FinalAcks, number: int) -> list[tuple[str, str]]:
    """(stream, request) of the next words."""
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        running = group.create_task(words.run())
        said = [await bus.said.get() for _ in range(number)]
        assert all(ack.outcome is Outcome.SKIPPED for _, ack in said)
        running.cancel()
    assert bus.said.empty()
    return [(stream, ack.request_id) for stream, ack in said]


@pytest.fixture
def bus() -> FakeBus:
    return FakeBus()


@pytest.fixture
def words(bus: FakeBus) -> FinalAcks:
    return FinalAcks(cast(AsyncBus, bus), "gateway-0")


def num_unsaid(words: FinalAcks) -> int:
    outbox: Any = words._outbox
    return int(outbox.qsize())


async def test_nothing_is_said_for_who_was_answered_as_planned(words: FinalAcks) -> None:
    asked = ticket("req-1")
    async with words.of(asked):
        words.hear(metadata("req-1"))
        asked.answered_by = "pd-0"
    assert num_unsaid(words) == 0


@pytest.mark.parametrize("answered_by", [None, "pd-1"])
async def test_who_ended_otherwise_is_said_to_every_encoder_that_made_it(
    bus: FakeBus, words: FinalAcks, answered_by: str | None
) -> None:
    asked = ticket("req-1")
    async with words.of(asked):
        words.hear(metadata("req-1"))
        words.hear(metadata("req-1", encoder="encoder-1"))
        asked.answered_by = answered_by
        assert num_unsaid(words) == 0, "while it lives it may need the item"
    assert await heard(bus, words, 2) == [
        ("triptych:test:acks:encoder-0", "req-1"),
        ("triptych:test:acks:encoder-1", "req-1"),
    ]


async def test_metadata_that_come_after_the_end_are_answered_at_once(bus: FakeBus, words: FinalAcks) -> None:
    async with words.of(ticket("living")):
        words.hear(metadata("gone", "living"))
        words.hear(metadata("foreign", gateway="gateway-1"))
        assert await heard(bus, words, 1) == [("triptych:test:acks:encoder-0", "gone")]


async def test_a_word_that_cannot_be_said_does_not_stop_the_next(bus: FakeBus, words: FinalAcks) -> None:
    bus.is_away = True
    words.hear(metadata("first", "second"))
    assert await heard(bus, words, 1) == [("triptych:test:acks:encoder-0", "second")]
