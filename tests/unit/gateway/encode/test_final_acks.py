"""Which encoders get the gateway's own final acks."""

import asyncio
from typing import cast

import pytest

from tests.support.item_records import item_record
from triptych_common.bus import AsyncBus
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.ids import RequestId
from triptych_common.protocol.messages import EncoderCacheMetadata, ItemAck, Modality, Outcome, Requester
from triptych_common.protocol.names import StreamNames
from triptych_gateway.encode.final_acks import FinalAcks
from triptych_gateway.encode.item_wait import ItemWait

LIMIT_S = 60.0


class FakeBus:
    """Keeps what was published; `is_away` once."""

    names = StreamNames("test")

    def __init__(self) -> None:
        self.published: asyncio.Queue[tuple[str, ItemAck]] = asyncio.Queue()
        self.is_away = False

    async def publish(self, stream: str, message: ItemAck) -> str:
        if self.is_away:
            self.is_away = False
            raise BusUnavailableError("away")
        await self.published.put((stream, message))
        return "1-1"


def metadata(
    *request_ids: str, encoder: str = "encoder-0", gateway: str = "gateway-0"
) -> EncoderCacheMetadata:
    return EncoderCacheMetadata(
        job_id="job-1", mm_hash="ab" * 32, modality=Modality.IMAGE, num_embeds=1, width=4, dtype="float32",
        num_bytes=16, record=item_record(1), encoder=encoder, store="store-0", sealed=False,
        requesters=tuple(
            Requester(request_id=each, item_index=0, gateway=gateway, prefill_decode="pd-0")
            for each in request_ids
        ),
    )  # fmt: skip


def wait_of(request_id: str) -> ItemWait:
    return ItemWait(
        RequestId(request_id), "pd-0", (), deadline=0.0, traceparent=None, namespace_digest="d" * 64
    )


async def sent(bus: FakeBus, final_acks: FinalAcks, number: int) -> list[tuple[str, str]]:
    """(stream, request) of the next acks."""
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        running = group.create_task(final_acks.run_sender())
        acks = [await bus.published.get() for _ in range(number)]
        assert all(ack.outcome is Outcome.SKIPPED for _, ack in acks)
        running.cancel()
    assert bus.published.empty()
    return [(stream, ack.request_id) for stream, ack in acks]


@pytest.fixture
def bus() -> FakeBus:
    return FakeBus()


@pytest.fixture
def final_acks(bus: FakeBus) -> FinalAcks:
    return FinalAcks(cast(AsyncBus, bus), "gateway-0")


async def test_metadata_that_come_after_the_end_are_answered_at_once(
    bus: FakeBus, final_acks: FinalAcks
) -> None:
    async with final_acks.hold_acks(wait_of("living")):
        final_acks.on_metadata(metadata("gone", "living"))
        final_acks.on_metadata(metadata("foreign", gateway="gateway-1"))
        assert await sent(bus, final_acks, 1) == [("triptych:test:acks:encoder-0", "gone")]


async def test_an_ack_that_cannot_be_sent_does_not_stop_the_next(bus: FakeBus, final_acks: FinalAcks) -> None:
    bus.is_away = True
    final_acks.on_metadata(metadata("first", "second"))
    assert await sent(bus, final_acks, 1) == [("triptych:test:acks:encoder-0", "second")]
