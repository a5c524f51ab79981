"""Requesters that join, leave and share: several jobs and requests for one item."""

import asyncio
from typing import Any

import pytest

from tests.support.encoder.encoder_bench import DIGEST, HASH, Bench, delivery_of
from triptych_common.coordination import StartResult
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import FailureKind
from triptych_encoder.encoding import BadMediaError
from triptych_vllm_connector.step_orders import WriteOrder


@pytest.mark.parametrize("num_deliveries", [1, 2])
async def test_only_a_job_that_an_encoder_had_before_is_started_when_it_is_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, num_deliveries: int
) -> None:
    await bench.claim("req-0")
    started, start_job = list[bool](), bench.single_flight.start_job

    async def noted(*args: Any, **options: Any) -> Any:
        started.append(options["metadata"] is not None)
        return await start_job(*args, **options)

    monkeypatch.setattr(bench.single_flight, "start_job", noted)
    delivery = delivery_of("job-0", "req-0")
    delivery.num_deliveries = num_deliveries
    await bench.run(delivery)
    assert started == [num_deliveries == 1]
    assert bench.single_flight.flights[HASH].metadata is not None


async def test_a_failure_of_a_job_that_was_handed_back_is_told(bench: Bench) -> None:
    """The flight names the encoder that had it; here it failed before its item was announced."""
    await bench.claim("req-0")
    delivery = delivery_of("job-0", "req-0")
    await bench.single_flight.start_job(
        delivery.envelope.message, delivery.entry_id, "encoder-9", lease_s=60.0, ttl_s=60.0
    )
    bench.engine.preprocess_error = BadMediaError("no image")
    await bench.run(delivery)
    assert bench.reporter.sent == [("job-0", FailureKind.BAD_MEDIA, "no image")]


async def test_a_job_without_requesters_is_dropped(bench: Bench) -> None:
    await bench.claim("req-0")
    bench.jobs.deliver("1-1")
    assert await bench.single_flight.leave_flight(HASH, [("req-0", 0)], namespace_digest=DIGEST)
    delivery = delivery_of("job-0", "req-0")
    await asyncio.wait_for(bench.runner.run(delivery), 60)
    assert (bench.engine.orders, bench.reporter.sent, delivery.num_acks) == ([], [], 1)
    assert bench.leases.num_dropped == 1


async def test_a_second_entry_of_a_job_that_is_worked_on_is_dropped(bench: Bench) -> None:
    """Sent again, because Redis had lost the first."""
    await bench.claim("req-0")

    async def on_encode(order: WriteOrder) -> None:
        again = delivery_of("job-0", "req-0")
        again.entry_id = "1-2"
        await bench.run(again)
        assert again.num_acks == 1
        await bench.store_client.seal(order)

    bench.engine.on_encode = on_encode
    await bench.run(delivery_of("job-0", "req-0"))
    assert len(bench.engine.orders) == 1
    assert bench.leases.num_superseded == 1


async def test_without_the_flights_a_job_is_done_for_those_it_names(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*args: Any, **options: Any) -> Any:
        raise BusUnavailableError("away")

    for step in ("start_job", "announce_metadata", "finish_flight"):
        monkeypatch.setattr(bench.single_flight, step, away)
    await bench.run(delivery_of())
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]
    assert bench.ledger.remove_requesters(HASH, {("req-1", 0)}) == [1]


async def test_requesters_get_metadata_even_if_a_full_redis_noted_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def started(*args: Any, **options: Any) -> Any:
        return StartResult.STARTED, ()

    monkeypatch.setattr(bench.single_flight, "start_job", started)
    await bench.run(delivery_of())
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]
    assert bench.ledger.remove_requesters(HASH, {("req-1", 0)}) == [1]


async def test_a_second_delivery_of_a_job_does_not_undo_that_the_first_has_blocks(bench: Bench) -> None:
    first, second = delivery_of(), delivery_of()
    second.entry_id = "1-2"
    write, seen = bench.engine.on_encode, list[bool]()

    async def on_encode(order: WriteOrder) -> None:
        await bench.run(second)
        seen.extend(bench.runner.has_blocks(each) for each in (first, second))
        await write(order)

    bench.engine.on_encode = on_encode
    await bench.run(first)
    assert seen == [True, False]
    assert not bench.runner.has_blocks(first)


async def test_a_failed_job_does_not_take_the_item_from_those_of_an_earlier_one(bench: Bench) -> None:
    await bench.run(delivery_of("job-1", "req-1"))
    await bench.run(delivery_of("job-2", "req-2", remaining_ms=0))
    assert bench.store_client.ended_pins == []
    assert bench.ledger.remove_requesters(HASH, {("req-1", 0)}) == [1]
