"""The encoder's drain: real Redis, real store; an engine of the test in place of vLLM."""

import asyncio

import pytest

from tests.support.encoder.service_bench import (
    COMPUTE,
    DIGEST,
    LIMIT_S,
    TimidEngine,
    job,
    serve,
    settings_of,
    working,
)
from tests.support.stores import StoreProcess
from tests.support.waiting import until, until_async
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import (
    EncodeCompleted,
    EncodeJob,
    EncoderCacheMetadata,
    ItemAck,
    Outcome,
)
from triptych_common.protocol.names import inboxes
from triptych_common.runtime import StopSignal
from triptych_common.store_session import AsyncStoreSession
from triptych_encoder.encoding import EngineFailedError
from triptych_vllm_connector.config import worker_session_name

RUNNING, WAITING, QUEUED = "a" * 64, "b" * 64, "c" * 64


async def test_what_has_begun_is_finished_the_rest_is_handed_back(
    redis_url: str, store: StoreProcess
) -> None:
    async with working(redis_url, store, drain_timeout_s=60) as bench:
        engine = bench.engine
        for mm_hash in (RUNNING, WAITING, QUEUED):
            await bench.publish(mm_hash)
        engine.may_preprocess[RUNNING].set()
        async with asyncio.timeout(LIMIT_S):
            await engine.is_encoding.wait()
            await until(lambda: engine.num_preprocessing >= 2)

        (record,) = await bench.records()
        assert record.compute == COMPUTE, "what the engine computes on is announced"
        bench.stop.set("SIGTERM")
        handed_back = await bench.taken_over(2)
        assert sorted(each.envelope.message.mm_hash for each in handed_back) == [WAITING, QUEUED]  # type: ignore[attr-defined]
        assert all(each.num_deliveries == 1 for each in handed_back)
        assert await bench.is_draining()

        engine.may_encode.set()
        metadata, completed = await bench.results(2)
        assert isinstance(metadata, EncoderCacheMetadata)
        assert isinstance(completed, EncodeCompleted)
        assert completed.mm_hash == RUNNING
        assert store.stats().num_pins == 1  # the producer's, until the requester's final ack
        assert not bench.work.done()

        ack = ItemAck(
            request_id="req-1",
            item_index=0,
            job_id=job(RUNNING).job_id,
            mm_hash=RUNNING,
            prefill_decode="pd-0",
            outcome=Outcome.INJECTED,
        )
        await bench.bus.publish(bench.bus.names.acks("encoder-0"), ack)
        async with asyncio.timeout(LIMIT_S):
            await bench.work
        assert await Registry(bench.bus).list_instances() == []
        assert await bench.bus.client.exists(*inboxes(bench.bus.names, "encoder-0")) == 0
        assert store.stats().num_pins == 0
        assert store.stats().num_entries == 1


async def test_what_is_not_finished_in_time_is_handed_back(redis_url: str, store: StoreProcess) -> None:
    async with working(redis_url, store, drain_timeout_s=0.2) as bench:
        await bench.publish(RUNNING)
        bench.engine.may_preprocess[RUNNING].set()
        async with asyncio.timeout(LIMIT_S):
            await bench.engine.is_encoding.wait()
            bench.stop.set("SIGTERM")
            await bench.work
        (again,) = await bench.taken_over(1)
        assert isinstance(again.envelope.message, EncodeJob)
        assert again.envelope.message.mm_hash == RUNNING


async def test_idle_it_ends_at_once(redis_url: str, store: StoreProcess) -> None:
    async with working(redis_url, store, drain_timeout_s=600) as bench, asyncio.timeout(LIMIT_S):
        await until_async(Registry(bench.bus).list_instances)
        bench.stop.set("SIGTERM")
        await bench.work


async def test_an_engine_that_hangs_ends_the_service_with_one_clear_error(
    redis_url: str, store: StoreProcess
) -> None:
    settings = settings_of(redis_url, store, engine_timeout_s=0.3)
    async with (
        await AsyncBus.connect(redis_url, "default", client_name="test") as bus,
        await AsyncStoreSession.connect(store.socket, worker_session_name("encoder-0")) as worker,
    ):
        engine = TimidEngine(worker)
        engine.may_preprocess[RUNNING].set()
        await bus.publish(bus.names.encode_jobs(DIGEST), job(RUNNING), remaining_ms=60_000, blob=b"media")
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(EngineFailedError, match="has not answered"):
                await serve(settings, engine, StopSignal())
        assert await Registry(bus).list_instances() == []
        assert await bus.stream_length(bus.names.encode_jobs(DIGEST)) == 1  # another encoder's
