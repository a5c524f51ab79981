"""One encode job from delivery to ack: the whole way, and jobs that are not done."""

import logging
import subprocess
import sys
from dataclasses import replace

import pytest
from opentelemetry import trace

from tests.support.encoder.encoder_bench import HASH, Bench, FakeDelivery, delivery_of, requester
from tests.support.item_records import item_record
from triptych_common.coordination import ClaimResult
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeCompleted, FailureKind
from triptych_encoder.encoding import BadMediaError, PreprocessFailedError
from triptych_vllm_connector.step_orders import WriteOrder

ANOTHER = "e" * 64


async def test_the_whole_way(bench: Bench) -> None:
    delivery = delivery_of()
    await bench.run(delivery)
    metadata, completed = bench.reporter.sent
    assert (metadata.num_embeds, metadata.width, metadata.dtype, metadata.num_bytes) == (3, 4, "float32", 48)
    assert (metadata.encoder, metadata.store, metadata.sealed) == ("encoder-0", "store-0", False)
    assert metadata.record == item_record(3, (1, 2, 2))
    assert completed.TYPE == "EncodeCompleted"
    (order,) = bench.engine.orders
    assert (order.mm_hash, order.job_id, order.reservation_id, order.num_embeds) == (HASH, "job-1", 1, 3)
    assert delivery.num_acks == 1
    assert bench.store_client.ended_pins == []  # the pin waits for the consumer
    assert bench.ledger.remove_requesters(HASH, {("req-1", 0)}) == [1]
    assert bench.runner.num_encodes == 1


async def test_no_encode_waits_until_redis_has_the_metadata(bench: Bench) -> None:
    bench.reporter.takes_metadata.clear()

    async def on_encode(order: WriteOrder) -> None:
        assert bench.reporter.kinds == []
        await bench.store_client.seal(order)
        bench.reporter.takes_metadata.set()

    bench.engine.on_encode = on_encode
    await bench.run(delivery_of())
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"], "the completion waits"


async def test_lack_of_memory_is_not_final_and_a_librarys_text_is_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.engine.preprocess_error = PreprocessFailedError("no resources")
    bench.engine.preprocess_error.__cause__ = MemoryError("words of a library")
    with caplog.at_level(logging.INFO):
        await bench.run(delivery_of())
    assert bench.reporter.sent == [("job-1", FailureKind.ENCODER_ERROR, "no resources")]
    (failed,) = (record for record in caplog.records if record.message == "job failed")
    fields = vars(failed)["triptych_fields"]
    assert (fields["job_id"], fields["cause"]) == ("job-1", "MemoryError('words of a library')")


async def test_a_job_of_another_namespace_is_refused_and_costs_its_item_nothing(bench: Bench) -> None:
    """It is on this stream by mistake: a gateway that waits finds the item on none, and sends it again."""
    await bench.claim("req-0")
    strayed = delivery_of("job-0", "req-0", namespace_digest=ANOTHER)
    await bench.runner.run(strayed)
    await bench.runner.on_dead_letter(strayed.envelope, "delivered too often")
    assert (strayed.rejected, strayed.num_acks) == (["job of another namespace than the stream's"], 0)
    assert bench.reporter.sent == []
    assert bench.engine.orders == []
    assert bench.store_client.num_reservations == 0
    flight = bench.single_flight.flights[HASH]
    assert (flight.state, flight.attempt, flight.failure) == ("queued", 1, None)
    bench.jobs.remove(flight.entry_id)
    claim = await bench.single_flight.claim_flight(
        HASH, [requester("req-0")], namespace_digest=ANOTHER, mode="check", job_id="job-0", attempt=1,
        max_attempts=2, ttl_s=10,
    )  # fmt: skip
    assert (claim.result, claim.job_id, claim.attempt) == (ClaimResult.OWNER, "job-0", 1)


async def test_media_that_are_gone(bench: Bench) -> None:
    await bench.run(delivery_of(blob=None))
    assert bench.reporter.kinds == [FailureKind.MEDIA_GONE]
    times = bench.metrics.metrics.registry.get_sample_value(
        "triptych_encoder_fetch_seconds_count", {"modality": "image"}
    )
    assert times == 1  # a fetch that fails is timed, too


@pytest.mark.parametrize("num_embeds", [98, 51])
async def test_an_item_longer_than_the_model_or_its_encoder_takes(bench: Bench, num_embeds: int) -> None:
    bench.engine.num_embeds = num_embeds
    await bench.run(delivery_of())
    assert bench.reporter.kinds == [FailureKind.TOO_LARGE]


async def test_a_job_whose_deadline_has_passed_is_not_begun(bench: Bench) -> None:
    await bench.run(delivery_of(remaining_ms=0))
    assert bench.reporter.kinds == [FailureKind.EXPIRED]


async def test_an_outcome_that_cannot_be_sent_leaves_the_job_to_another_encoder(bench: Bench) -> None:
    bench.reporter.error = BusUnavailableError("away")
    delivery = delivery_of()
    with pytest.raises(BusUnavailableError):
        await bench.run(delivery)
    assert delivery.num_acks == 0


async def test_a_job_delivered_too_often_is_reported_before_it_becomes_a_dead_letter(bench: Bench) -> None:
    await bench.runner.on_dead_letter(delivery_of().envelope, "delivered 4 times")
    assert bench.reporter.sent == [("job-1", FailureKind.DEAD_LETTER, "delivered 4 times")]


async def test_log_lines_of_a_job_have_the_id_of_its_requests_trace(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those between its spans, and in a process that records none."""
    bench.engine.preprocess_error = BadMediaError("no image")
    ids: list[int] = []

    def note(record: logging.LogRecord) -> bool:
        ids.append(trace.get_current_span().get_span_context().trace_id)
        return True

    caplog.handler.addFilter(note)
    delivery = delivery_of()
    traced = replace(delivery.envelope, traceparent=f"00-{'7' * 32}-{'8' * 16}-00")
    with caplog.at_level(logging.INFO):
        await bench.run(replace(delivery, envelope=traced))
    assert "job failed" in [record.message for record in caplog.records]
    assert set(ids) == {int("7" * 32, 16)}


async def test_what_is_no_job_is_acked_and_ignored(bench: Bench) -> None:
    message = EncodeCompleted(job_id="j", mm_hash=HASH, encoder="e", encode_s=0)
    delivery = FakeDelivery(Envelope(message))
    await bench.run(delivery)
    assert delivery.num_acks == 1
    assert bench.reporter.sent == []


def test_a_job_can_be_imported_without_vllm_and_torch() -> None:
    code = "import sys, triptych_encoder.jobs.job_runner; print(sorted({'vllm', 'torch'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
