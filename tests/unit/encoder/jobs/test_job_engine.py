"""An encode job and the engine: refusals, timeouts, death, and an encoder that ends."""

import asyncio

import pytest

from tests.support.encoder.encoder_bench import HASH, Bench, delivery_of
from triptych_common.protocol.messages import FailureKind
from triptych_encoder.encoding import EncodeRefusedError, EngineFailedError
from triptych_encoder.jobs import job_runner
from triptych_encoder.store import store_reservations
from triptych_vllm_connector.step_orders import WriteOrder


async def test_a_refusal_of_what_another_encoder_sealed_meanwhile_does_not_matter(bench: Bench) -> None:
    async def refuse_late(order: WriteOrder) -> None:
        await bench.store_client.seal(order)
        raise EncodeRefusedError("too late to be needed")

    bench.engine.on_encode = refuse_late
    await bench.run(delivery_of())
    assert bench.store_client.cancelled == [1]
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]
    assert bench.ledger.remove_requesters(HASH, {("req-1", 0)}) == [1], "the pin has no owner"


async def test_an_output_that_is_not_written_fails_the_job_in_bounded_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_reservations, "SEAL_TIMEOUT_S", 0.01)

    async def write_nothing(order: WriteOrder) -> None:
        pass

    bench.engine.on_encode = write_nothing
    await bench.run(delivery_of())
    assert bench.reporter.kinds == ["EncoderCacheMetadata", FailureKind.ENCODER_ERROR]
    assert bench.store_client.unwatched == [(HASH, 1)]
    assert len(bench.ledger) == 0


async def test_an_item_is_in_work_until_the_gpu_has_written_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine answers when it has launched a step; what comes behind the item waits for the seal."""
    monkeypatch.setattr(job_runner, "WRITE_CHECK_S", 0.001)
    orders: list[WriteOrder] = []
    num_in_work: list[int] = []

    async def launch(order: WriteOrder) -> None:
        orders.append(order)

    async def is_writing() -> bool:
        num_in_work.append(bench.gate._policy.num_in_engine)
        if len(num_in_work) == 3:
            await bench.store_client.seal(orders[0])
        return True

    bench.engine.on_encode = launch
    monkeypatch.setattr(bench.engine, "is_writing", is_writing)
    await bench.run(delivery_of())
    assert num_in_work == [1, 1, 1]
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]
    assert bench.store_client.cancelled == []


async def test_a_gpu_that_never_writes_is_a_hanging_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are not given back: it may write yet, until its process has ended."""
    monkeypatch.setattr(job_runner, "WRITE_CHECK_S", 0.001)
    monkeypatch.setattr(store_reservations, "SEAL_TIMEOUT_S", 0.01)
    bench = Bench(engine_timeout_s=0.05)

    async def launch(order: WriteOrder) -> None:
        pass

    async def is_writing() -> bool:
        return True

    bench.engine.on_encode = launch
    monkeypatch.setattr(bench.engine, "is_writing", is_writing)
    delivery = delivery_of()
    with pytest.raises(EngineFailedError, match="has not answered"):
        await bench.run(delivery)
    assert bench.store_client.unwatched == []
    assert bench.store_client.cancelled == []
    assert delivery.num_acks == 0


async def test_a_dead_engine_leaves_the_job_to_another_encoder(bench: Bench) -> None:
    async def die(order: WriteOrder) -> None:
        raise EngineFailedError("dead")

    bench.engine.on_encode = die
    delivery = delivery_of()
    with pytest.raises(EngineFailedError):
        await bench.run(delivery)
    assert delivery.num_acks == 0


async def test_the_death_of_an_engine_waits_for_no_announcement(bench: Bench) -> None:
    bench.reporter.takes_metadata.clear()

    async def die(order: WriteOrder) -> None:
        raise EngineFailedError("dead")

    bench.engine.on_encode = die
    with pytest.raises(EngineFailedError):
        await bench.run(delivery_of())
    assert bench.reporter.kinds == []


async def test_a_refusal_is_reported_behind_the_metadata(bench: Bench) -> None:
    bench.reporter.takes_metadata.clear()

    async def refuse(order: WriteOrder) -> None:
        bench.reporter.takes_metadata.set()
        raise EncodeRefusedError("too many tokens")

    bench.engine.on_encode = refuse
    await bench.run(delivery_of())
    assert bench.reporter.kinds == ["EncoderCacheMetadata", FailureKind.ENCODER_ERROR]


async def test_a_cancelled_job_is_handed_back(bench: Bench) -> None:
    encodes = asyncio.Event()

    async def hang(order: WriteOrder) -> None:
        encodes.set()
        await asyncio.Event().wait()

    bench.engine.on_encode = hang
    delivery = delivery_of()
    bench.publish(delivery)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(bench.runner.run(delivery))
        await encodes.wait()
        task.cancel()
    assert (delivery.num_acks, delivery.num_hand_backs) == (0, 1)
