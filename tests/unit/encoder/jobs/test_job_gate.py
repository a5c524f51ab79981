"""A job that waits for its encode: dropped, too late, sealed by another encoder, counted without its wait."""

import asyncio
import contextlib
import time
from typing import Any

import pytest

from tests.support.encoder.encoder_bench import DIGEST, HASH, Bench, FakeEngine, delivery_of, requester
from tests.support.waiting import until
from triptych_common.domain.errors import StoreError
from triptych_common.protocol.messages import FailureKind, requester_key
from triptych_encoder.jobs import job_leases
from triptych_encoder.jobs.encode_gate import EncodeGate
from triptych_encoder.jobs.gate_policy import MAX_BATCHES, GateItem, GatePolicy
from triptych_encoder.metrics import EncoderMetrics

KEY = requester_key(requester("req-1"))


class Occupied:
    """The gate of a bench, whose engine is busy with others until it is let go."""

    def __init__(self, bench: Bench) -> None:
        self._policy = bench.gate._policy
        self._items = [GateItem(frozenset({(f"other-{n}", 0)}), 0.0, 1e9) for n in range(MAX_BATCHES)]
        self._gate = bench.gate
        for each in self._items:
            self._policy.add_item(each)
            self._policy.set_ready(each)
            assert self._policy.take_batch() == [each]

    def let_go(self) -> None:
        for each in self._items:
            self._gate._leave(each)


async def waiting_at_the_gate(bench: Bench) -> None:
    await until(lambda: bench.gate._policy.num_ready)
    if bench.reporter.takes_metadata.is_set():
        await until(bench.reporter.has_metadata.is_set)


async def held_at_the_gate(bench: Bench, delivery: Any) -> tuple[Occupied, "asyncio.Future[None]"]:
    """A job that has come as far as the gate, whose engine is busy."""
    occupied = Occupied(bench)
    task = asyncio.ensure_future(bench.run(delivery))
    await waiting_at_the_gate(bench)
    return occupied, task


async def test_a_job_that_is_dropped_before_it_is_announced_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_leases, "REFRESH_AFTER_S", 0.0)
    bench.reporter.takes_metadata.clear()
    occupied, task = await held_at_the_gate(bench, delivery_of())
    await bench.single_flight.leave_flight(HASH, [KEY], namespace_digest=DIGEST)
    occupied.let_go()
    await until(lambda: not bench.gate._turns)
    bench.reporter.takes_metadata.set()
    await task
    assert bench.leases.num_dropped == 1
    assert (bench.engine.orders, len(bench.ledger)) == ([], 0)
    assert bench.store_client.unwatched == [(HASH, 1)]


async def test_redis_is_not_asked_again_about_an_item_whose_preprocessing_took_long(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its announcement asks already, and the engine is free."""
    monkeypatch.setattr(job_leases, "REFRESH_AFTER_S", 1.0)
    num_starts = 0
    start_job = bench.single_flight.start_job

    async def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_starts
        num_starts += 1
        return await start_job(*args, **options)

    async def preprocess(job: Any, media: bytes) -> Any:
        active = next(iter(bench.runner._active.values()))
        active.refreshed_at -= 2.0
        return await FakeEngine.preprocess(bench.engine, job, media)

    monkeypatch.setattr(bench.single_flight, "start_job", counted)
    monkeypatch.setattr(bench.engine, "preprocess", preprocess)
    await bench.run(delivery_of())
    assert (num_starts, bench.reporter.kinds) == (1, ["EncoderCacheMetadata", "EncodeCompleted"])


async def test_an_item_that_redis_lost_is_encoded_for_those_that_have_its_metadata(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_leases, "REFRESH_AFTER_S", 0.0)
    occupied, task = await held_at_the_gate(bench, delivery_of())
    bench.single_flight.flights.clear()
    bench.jobs.lose()
    occupied.let_go()
    await task
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]
    assert bench.leases.num_dropped == 0


async def test_an_engine_does_not_wait_for_a_redis_that_does_not_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_leases, "REFRESH_AFTER_S", 0.0)
    monkeypatch.setattr(job_leases, "ASK_LIMIT_S", 0.01)
    occupied, task = await held_at_the_gate(bench, delivery_of())

    async def away(*args: Any, **options: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(bench.single_flight, "start_job", away)
    occupied.let_go()
    await task
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]


async def test_a_job_whose_turn_comes_too_late_has_expired(bench: Bench) -> None:
    occupied = Occupied(bench)
    delivery = delivery_of(remaining_ms=50)
    await bench.run(delivery)
    assert bench.reporter.kinds == ["EncoderCacheMetadata", FailureKind.EXPIRED]
    assert bench.store_client.unwatched == [(HASH, 1)]
    assert (delivery.num_acks, bench.engine.orders) == (1, [])
    occupied.let_go()


async def test_an_item_that_another_encoder_sealed_meanwhile_is_not_encoded(bench: Bench) -> None:
    occupied, task = await held_at_the_gate(bench, delivery_of())
    bench.store_client.pin(bench.store_client.futures[0])
    occupied.let_go()
    await task
    assert bench.engine.orders == []
    assert bench.store_client.cancelled == [1]
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]
    assert bench.ledger.remove_requesters(HASH, {KEY}) == [1]


async def test_an_item_that_is_sealed_while_redis_is_asked_is_not_encoded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_leases, "REFRESH_AFTER_S", 0.0)
    occupied, task = await held_at_the_gate(bench, delivery_of())
    start_job = bench.single_flight.start_job

    async def sealed_meanwhile(*args: Any, **options: Any) -> Any:
        bench.store_client.pin(bench.store_client.futures[0])
        return await start_job(*args, **options)

    monkeypatch.setattr(bench.single_flight, "start_job", sealed_meanwhile)
    occupied.let_go()
    await task
    assert bench.engine.orders == []
    assert bench.store_client.cancelled == [1]
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]


async def test_nothing_is_encoded_into_blocks_whose_writer_went_away(bench: Bench) -> None:
    occupied, task = await held_at_the_gate(bench, delivery_of())
    bench.store_client.futures[0].set_exception(StoreError("unknown_reservation", "the writer went away"))
    occupied.let_go()
    await task
    assert bench.engine.orders == []
    assert bench.reporter.kinds == ["EncoderCacheMetadata", FailureKind.ENCODER_ERROR]
    assert bench.store_client.unwatched == [(HASH, 1)]
    assert len(bench.ledger) == 0


async def test_a_job_that_is_cancelled_at_the_gate_gives_its_blocks_back(bench: Bench) -> None:
    delivery = delivery_of()
    occupied, task = await held_at_the_gate(bench, delivery)
    assert bench.runner.has_blocks(delivery)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (delivery.num_hand_backs, len(bench.ledger)) == (1, 0)
    assert bench.store_client.unwatched == [(HASH, 1)]
    occupied.let_go()
    assert bench.gate._policy.num_in_engine == 0


async def test_seconds_in_the_engine_do_not_count_those_of_items_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    now = 10.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    gate = EncodeGate(GatePolicy(encode_batch=1), EncoderMetrics())
    item = GateItem(frozenset(), 0.0, 60.0)
    now = 13.0
    assert gate.on_answer(item, 10.0) == 3.0
    now = 15.0
    assert gate.on_answer(item, 11.0) == 2.0


async def test_items_of_one_batch_share_its_seconds_by_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:

    now = 10.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    gate = EncodeGate(GatePolicy(encode_batch=4), EncoderMetrics())
    async with contextlib.AsyncExitStack() as stack:
        items = [GateItem(frozenset({(f"r{n}", 0)}), 0.0, 100.0) for n in range(4)]
        first, *items = items
        stack.enter_context(gate.in_hand(first))
        before = gate.turn(first, 1)
        await before.__aenter__()  # so that the others are gathered
        for item in items:
            stack.enter_context(gate.in_hand(item))
        turns = [gate.turn(item, num_rows) for item, num_rows in zip(items, (8, 4, 4), strict=True)]
        entering = [asyncio.ensure_future(turn.__aenter__()) for turn in turns]
        await asyncio.sleep(0)
        await before.__aexit__(None, None, None)
        await asyncio.gather(*entering)
        worked = []
        now = 14.0
        for item, turn in zip(items, turns, strict=True):
            worked.append(gate.on_answer(item, 10.0))
            await turn.__aexit__(None, None, None)
    assert worked == [2.0, 1.0, 1.0]


async def test_the_next_item_goes_to_the_engine_before_the_one_that_is_computed_ends() -> None:
    gate = EncodeGate(GatePolicy(encode_batch=1), EncoderMetrics(), lambda: 0.05)
    ends, begun = asyncio.Event(), []

    async def encoded(name: str) -> None:
        item = GateItem(frozenset({(name, 0)}), 0.0, time.monotonic() + 60)
        with gate.in_hand(item):
            async with gate.turn(item, num_rows=2):
                begun.append((name, time.monotonic()))
                await ends.wait()

    async with asyncio.TaskGroup() as group:
        for name in ("first", "second"):
            group.create_task(encoded(name))
        await until(lambda: len(begun) == 2)
        ends.set()
    (_, first_at), (_, second_at) = begun
    assert second_at - first_at > 0.07, "it was held back"
    assert gate._timer is None
