"""The encoder's drain: real Redis, real store; an engine of the test in place of vLLM."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from triptych_cache_store.testing import StoreProcess
from triptych_common.bus import AsyncBus, Delivery
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import (
    EncodeCompleted,
    EncodeJob,
    EncoderCacheMetadata,
    ItemAck,
    Message,
    Modality,
    Outcome,
    Requester,
)
from triptych_common.protocol.names import ENCODERS_GROUP, OWNER_GROUP, inboxes
from triptych_common.protocol.store import Seal
from triptych_common.runtime import StopSignal
from triptych_common.store_session import AsyncStoreSession
from triptych_encoder.encoding import EngineFailedError, PreparedItem
from triptych_encoder.service import EncoderService
from triptych_encoder.settings import EncoderSettings
from triptych_vllm_connector.config import worker_session_name
from triptych_vllm_connector.step_orders import WriteOrder

LIMIT_S = 10.0
DIGEST = "d" * 64
RUNNING, WAITING, QUEUED = "a" * 64, "b" * 64, "c" * 64


class TimidEngine:
    """Preprocesses and encodes an item when the test lets it; its worker only seals."""

    dtype = "float32"
    width = 4
    max_num_tokens = 100
    max_item_embeds = 50

    def __init__(self, worker: AsyncStoreSession) -> None:
        self._worker = worker
        self.may_preprocess = {RUNNING: asyncio.Event(), WAITING: asyncio.Event()}
        self.may_encode = asyncio.Event()
        self.is_encoding = asyncio.Event()
        self.num_preprocessing = 0

    async def preprocess(self, job: EncodeJob, media: bytes) -> PreparedItem:
        self.num_preprocessing += 1
        await self.may_preprocess[job.mm_hash].wait()
        return PreparedItem({}, 3, 5, {})

    async def encode(self, prepared: PreparedItem, order: WriteOrder) -> None:
        self.is_encoding.set()
        await self.may_encode.wait()
        await self._worker.request(Seal(seq=0, reservation_id=order.reservation_id))

    async def check_health(self) -> None:
        return


def job(mm_hash: str) -> EncodeJob:
    requester = Requester(request_id="req-1", item_index=0, gateway="gateway-0", prefill_decode="pd-0")
    return EncodeJob(
        job_id=f"job-{mm_hash[0]}",
        mm_hash=mm_hash,
        modality=Modality.IMAGE,
        media_num_bytes=5,
        media_url=None,
        mm_processor_kwargs={},
        media_io_kwargs={},
        requesters=(requester,),
        attempt=1,
        namespace_digest=DIGEST,
    )


async def serve(settings: EncoderSettings, engine: TimidEngine, stop: StopSignal) -> None:
    async with EncoderService.open(settings, DIGEST, engine) as service:
        await service.run(stop)


class Bench:
    def __init__(self, bus: AsyncBus, engine: TimidEngine, stop: StopSignal, work: Any) -> None:
        self.bus, self.engine, self.stop, self.work = bus, engine, stop, work

    async def publish(self, mm_hash: str) -> None:
        await self.bus.publish(
            self.bus.names.encode_jobs(DIGEST), job(mm_hash), remaining_ms=60_000, blob=b"media"
        )

    async def is_draining(self) -> bool:
        (record,) = await Registry(self.bus).list_instances()
        return record.draining

    async def results(self, count: int) -> list[Message]:
        """The next results that the gateway gets."""
        stream = self.bus.names.encode_results("gateway-0")
        found: list[Message] = []
        async with (
            asyncio.timeout(LIMIT_S),
            self.bus.consumer(stream, group=OWNER_GROUP, consumer="gateway-0") as consumer,
        ):
            while len(found) < count:
                delivery = await anext(consumer)
                await delivery.ack()
                found.append(delivery.envelope.message)
        return found

    async def taken_over(self, count: int) -> list[Delivery]:
        """The next jobs of another encoder, whose lease is far too long for this test."""
        async with (
            asyncio.timeout(LIMIT_S),
            self.bus.consumer(
                self.bus.names.encode_jobs(DIGEST),
                group=ENCODERS_GROUP,
                consumer="encoder-1",
                prefetch=count,
                min_idle_ms=600_000,
            ) as consumer,
        ):
            return [await anext(consumer) for _ in range(count)]


def settings_of(redis_url: str, store: StoreProcess, **changes: float) -> EncoderSettings:
    values: dict[str, Any] = {
        "redis_url": redis_url,
        "store_socket": store.socket,
        "model": "model",
        "num_slots": 2,
        "takeover_idle_ms": 600_000,
    }
    return EncoderSettings(**values | changes)


@asynccontextmanager
async def working(redis_url: str, store: StoreProcess, drain_timeout_s: float) -> AsyncIterator[Bench]:
    settings = settings_of(redis_url, store, drain_timeout_s=drain_timeout_s)
    stop = StopSignal()
    async with (
        await AsyncBus.connect(redis_url, "default", client_name="test") as bus,
        await AsyncStoreSession.connect(store.socket, worker_session_name("encoder-0")) as worker,
        asyncio.TaskGroup() as group,
    ):
        engine = TimidEngine(worker)
        task = group.create_task(serve(settings, engine, stop))
        try:
            yield Bench(bus, engine, stop, task)
        finally:
            task.cancel()


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
            while engine.num_preprocessing < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

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
            job_id="job-a",
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
        while not await Registry(bench.bus).list_instances():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
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
