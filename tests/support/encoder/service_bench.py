"""The encoder's service over real Redis and a real store; an engine of the test in place of vLLM."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from tests.support.item_records import IMAGE_LIMITS, item_record
from tests.support.message_samples import encode_job
from tests.support.stores import StoreProcess
from triptych_common.bus import AsyncBus, Delivery
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import (
    Compute,
    EncodeJob,
    InstanceRecord,
    Message,
    Modality,
    Requester,
    Sharing,
)
from triptych_common.protocol.names import ENCODERS_GROUP, OWNER_GROUP
from triptych_common.protocol.store import Seal
from triptych_common.runtime import StopSignal
from triptych_common.store_session import AsyncStoreSession
from triptych_encoder.encoding import PreparedItem
from triptych_encoder.service import EncoderService
from triptych_encoder.settings import EncoderSettings
from triptych_vllm_connector.config import worker_session_name
from triptych_vllm_connector.step_orders import WriteOrder

LIMIT_S = 60.0
DIGEST = "d" * 64
COMPUTE = Compute(sharing=Sharing.CORES, policy="text_first", cores=(0,))


class TimidEngine:
    """Preprocesses and encodes an item when the test lets it; its worker only seals."""

    dtype = "float32"
    max_num_tokens = 100
    item_limits = IMAGE_LIMITS
    unserved_modalities: Mapping[Modality, str] = MappingProxyType({})
    max_item_embeds = 50

    def __init__(self, worker: AsyncStoreSession) -> None:
        self._worker = worker
        self.may_preprocess: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.may_encode = asyncio.Event()
        self.encodes: asyncio.Queue[str] = asyncio.Queue()  # mm_hashes, as the engine gets them
        self.may_seal: asyncio.Queue[None] | None = None  # one item is encoded for each; None: as it comes
        self.is_encoding = asyncio.Event()
        self.sealed: list[str] = []
        self.num_preprocessing = 0
        self._turn = asyncio.Lock()

    def num_pixels(self, job: EncodeJob) -> int:
        return job.image.num_pixels if job.image is not None else 0

    async def preprocess(self, job: EncodeJob, media: bytes) -> PreparedItem:
        self.num_preprocessing += 1
        await self.may_preprocess[job.mm_hash].wait()
        return PreparedItem({}, 3, 5, 4, item_record(3))

    async def encode(self, prepared: PreparedItem, order: WriteOrder) -> None:
        self.is_encoding.set()
        self.encodes.put_nowait(order.mm_hash)
        await self.may_encode.wait()
        async with self._turn:
            if self.may_seal is not None:
                await self.may_seal.get()
            self.sealed.append(order.mm_hash)
            await self._worker.request(Seal(seq=0, reservation_id=order.reservation_id))

    async def is_writing(self) -> bool:
        return False

    async def check_health(self) -> None:
        return


def job(mm_hash: str, request_id: str = "req-1", item_index: int = 0) -> EncodeJob:
    requester = Requester(
        request_id=request_id, item_index=item_index, gateway="gateway-0", prefill_decode="pd-0"
    )
    return encode_job(
        requester, job_id=f"job-{mm_hash[:8]}", mm_hash=mm_hash, media_num_bytes=5, namespace_digest=DIGEST
    )


async def serve(settings: EncoderSettings, engine: TimidEngine, stop: StopSignal) -> None:
    async with EncoderService.open(settings, DIGEST, engine, compute=COMPUTE) as service:
        await service.run(stop)


class Bench:
    def __init__(self, bus: AsyncBus, engine: TimidEngine, stop: StopSignal, work: Any) -> None:
        self.bus, self.engine, self.stop, self.work = bus, engine, stop, work

    async def publish(self, mm_hash: str, request_id: str = "req-1", item_index: int = 0) -> None:
        await self.bus.publish(
            self.bus.names.encode_jobs(DIGEST),
            job(mm_hash, request_id, item_index),
            remaining_ms=60_000,
            blob=b"media",
        )

    @property
    def registry(self) -> Registry:
        return Registry(self.bus)

    async def records(self) -> list[InstanceRecord]:
        return await self.registry.list_instances()

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


def settings_of(redis_url: str, store: StoreProcess, **changes: Any) -> EncoderSettings:
    values: dict[str, Any] = {
        "redis_url": redis_url,
        "store_socket": store.socket,
        "model": "model",
        "num_slots": 2,
        "takeover_idle_ms": 600_000,
    }
    return EncoderSettings(**values | changes)


@asynccontextmanager
async def working(redis_url: str, store: StoreProcess, **changes: Any) -> AsyncIterator[Bench]:
    settings = settings_of(redis_url, store, **changes)
    stop = StopSignal()
    async with (
        await AsyncBus.connect(redis_url, "default", client_name="test") as bus,
        await AsyncStoreSession.connect(store.socket, worker_session_name(settings.instance)) as worker,
        asyncio.TaskGroup() as group,
    ):
        engine = TimidEngine(worker)
        task = group.create_task(serve(settings, engine, stop))
        try:
            yield Bench(bus, engine, stop, task)
        finally:
            task.cancel()
