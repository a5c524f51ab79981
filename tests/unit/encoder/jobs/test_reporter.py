"""What the encoder sends about a job, and to which streams."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.message_samples import cache_metadata, encode_job
from triptych_common.bus.publisher import NewEntry, RefusedEntry
from triptych_common.domain.errors import BusUnavailableError, StreamFullError
from triptych_common.protocol import codec
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import (
    EncodeFailed,
    EncodeJob,
    EncoderCacheMetadata,
    FailureKind,
    Requester,
)
from triptych_common.protocol.names import StreamNames
from triptych_encoder.jobs.reporter import Reporter

NAMES = StreamNames("d")


class FakeBus:
    """Remembers what was published; `broken` streams refuse for now, `full` ones have no reader."""

    def __init__(self) -> None:
        self.published: list[tuple[str, Any, str | None]] = []
        self.num_round_trips = 0
        self.broken: set[str] = set()
        self.full: set[str] = set()
        self.is_away = False

    async def publish_encoded(self, entries: Sequence[NewEntry]) -> list[RefusedEntry]:
        self.num_round_trips += 1
        if self.is_away:
            raise BusUnavailableError("away")
        refused: list[RefusedEntry] = []
        for stream, fields in entries:
            if stream in self.full:
                refused.append(RefusedEntry((stream, fields), StreamFullError("no process reads it")))
            elif stream in self.broken:
                refused.append(RefusedEntry((stream, fields), BusUnavailableError("refused")))
            else:
                envelope = codec.decode(fields)
                self.published.append((stream, envelope.message, envelope.traceparent))
        return refused

    @property
    def streams(self) -> list[str]:
        return [stream for stream, _, _ in self.published]


@pytest.fixture
def bus() -> FakeBus:
    return FakeBus()


@pytest.fixture
def reporter(bus: FakeBus) -> Reporter:
    return Reporter(bus, NAMES, "encoder-0")


def job_for(*requesters: tuple[str, str]) -> EncodeJob:
    """(gateway, prefill_decode) of each."""
    return encode_job(
        *(
            Requester(request_id=f"req-{index}", item_index=0, gateway=gateway, prefill_decode=pd)
            for index, (gateway, pd) in enumerate(requesters)
        )
    )


def metadata_of(job: EncodeJob) -> EncoderCacheMetadata:
    return cache_metadata(
        *job.requesters, job_id=job.job_id, mm_hash=job.mm_hash, modality=job.modality, width=1, num_bytes=4
    )


async def test_metadata_go_to_everybody_once_and_to_the_consumers_first(
    bus: FakeBus, reporter: Reporter
) -> None:
    job = job_for(("g-0", "pd-0"), ("g-0", "pd-1"), ("g-1", "pd-0"))
    await reporter.send_metadata(metadata_of(job), Envelope(job, traceparent="tp"))
    assert sorted(bus.streams[:2]) == [NAMES.metadata("pd-0"), NAMES.metadata("pd-1")]
    assert sorted(bus.streams[2:]) == [NAMES.encode_results("g-0"), NAMES.encode_results("g-1")]
    assert {traceparent for _, _, traceparent in bus.published} == {"tp"}
    assert bus.num_round_trips == 1


async def test_what_was_written_is_not_sent_again_for_a_stream_that_refuses(
    bus: FakeBus, reporter: Reporter, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_for(("g-0", "pd-0"), ("g-1", "pd-1"))
    bus.broken = {NAMES.metadata("pd-0")}
    await reporter.send_metadata(metadata_of(job), Envelope(job, remaining_ms=200))
    assert bus.streams == [NAMES.metadata("pd-1"), NAMES.encode_results("g-0"), NAMES.encode_results("g-1")]
    assert bus.num_round_trips > 1
    assert caplog.messages == ["message given up"]


async def test_nothing_is_sent_for_no_requester(bus: FakeBus, reporter: Reporter) -> None:
    await reporter.send_completed(job_for(("g-0", "pd-0")), Envelope(job_for()), 0.5, ())
    assert bus.num_round_trips == 0


async def test_results_go_to_the_gateways(bus: FakeBus, reporter: Reporter) -> None:
    job = job_for(("g-0", "pd-0"), ("g-1", "pd-0"))
    await reporter.send_completed(job, Envelope(job), 0.5, job.requesters)
    failure = EncodeFailed(
        job_id=job.job_id, mm_hash=job.mm_hash, encoder="encoder-0", kind=FailureKind.BAD_MEDIA, detail="x"
    )
    await reporter.send_failed(failure, Envelope(job), job.requesters)
    assert sorted(bus.streams) == sorted([NAMES.encode_results("g-0"), NAMES.encode_results("g-1")] * 2)
    assert bus.published[-1][1] == failure


async def test_one_gateway_that_cannot_be_reached_does_not_keep_messages_from_the_others(
    bus: FakeBus, reporter: Reporter
) -> None:
    job = job_for(("g-0", "pd-0"), ("g-1", "pd-0"))
    bus.broken = {NAMES.encode_results("g-0")}
    await reporter.send_completed(
        job, Envelope(job, remaining_ms=100), 0.5, job.requesters
    )  # and the encoder lives on
    assert bus.streams == [NAMES.encode_results("g-1")]


async def test_a_reader_that_has_stopped_is_not_waited_for(bus: FakeBus, reporter: Reporter) -> None:
    job = job_for(("g-0", "pd-0"), ("g-1", "pd-1"))
    bus.full = {NAMES.metadata("pd-0")}
    async with asyncio.timeout(60):
        await reporter.send_metadata(metadata_of(job), Envelope(job, remaining_ms=60_000))
    assert bus.streams[0] == NAMES.metadata("pd-1")
    assert sorted(bus.streams[1:]) == [NAMES.encode_results("g-0"), NAMES.encode_results("g-1")]


async def test_a_redis_that_comes_back_in_time_gets_the_message(bus: FakeBus, reporter: Reporter) -> None:
    job = job_for(("g-0", "pd-0"))
    bus.broken = {NAMES.encode_results("g-0")}
    telling = asyncio.ensure_future(
        reporter.send_completed(job, Envelope(job, remaining_ms=5000), 0.5, job.requesters)
    )
    await asyncio.sleep(0)
    assert bus.streams == []
    bus.broken = set()
    await asyncio.wait_for(telling, 60)
    assert bus.streams == [NAMES.encode_results("g-0")]


async def test_a_redis_that_was_away_gets_all_messages(bus: FakeBus, reporter: Reporter) -> None:
    job, bus.is_away = job_for(("g-0", "pd-0")), True
    telling = asyncio.ensure_future(
        reporter.send_metadata(metadata_of(job), Envelope(job, remaining_ms=5000))
    )
    await asyncio.sleep(0)
    assert bus.num_round_trips == 1
    bus.is_away = False
    await asyncio.wait_for(telling, 60)
    assert bus.streams == [NAMES.metadata("pd-0"), NAMES.encode_results("g-0")]
