"""A `JobRunner` with fakes of engine, store client, reporter and Redis. No vLLM."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.flight_model import FlightModel, JobsModel
from tests.support.item_records import IMAGE_LIMITS, item_record
from triptych_common.coordination import JobOffer
from triptych_common.domain.errors import StoreError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import (
    EncodeCompleted,
    EncodeFailed,
    EncodeJob,
    EncoderCacheMetadata,
    Modality,
    Requester,
)
from triptych_common.protocol.names import StreamNames
from triptych_common.protocol.store import SHM, AlreadySealed, Reserved, TensorSpec
from triptych_common.runtime.liveness import Activity
from triptych_encoder.encoding import EngineFailedError, PreparedItem
from triptych_encoder.jobs.encode_gate import EncodeGate
from triptych_encoder.jobs.gate_policy import GatePolicy
from triptych_encoder.jobs.job_leases import JobLeases
from triptych_encoder.jobs.job_runner import JobRunner
from triptych_encoder.jobs.job_telemetry import EncodeSpeed, JobTelemetry
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.jobs.media_source import MediaSource
from triptych_encoder.metrics import EncoderMetrics
from triptych_encoder.preprocessing.cost_budget import CostBudget
from triptych_encoder.store.store_reservations import StoreReservations
from triptych_vllm_connector.host.engine_watchdog import EngineWatchdog
from triptych_vllm_connector.step_orders import WriteOrder

HASH = "a" * 64
DIGEST = "d" * 64
MEDIA = b"media"
PREPARED_PIXELS = 64_000_000


@dataclass
class FakeDelivery:
    """`Delivery`."""

    envelope: Envelope
    entry_id: str = "1-1"
    stream: str = StreamNames("test").encode_jobs(DIGEST)
    num_deliveries: int = 1
    num_acks: int = 0
    num_hand_backs: int = 0
    rejected: list[str] = field(default_factory=list)

    async def reject(self, reason: str) -> None:
        self.rejected.append(reason)

    async def ack(self) -> None:
        self.num_acks += 1

    async def hand_back(self) -> None:
        self.num_hand_backs += 1


@dataclass
class FakeEngine:
    """`Encoder`: rows as set; `on_encode` is what its worker does, by default it writes and seals."""

    on_encode: Callable[[WriteOrder], Awaitable[None]]
    width: int = 4
    dtype: str = "float32"
    max_num_tokens: int = 100
    max_item_embeds: int = 50
    item_limits: Mapping[Modality, int] = field(default_factory=lambda: IMAGE_LIMITS)
    unserved_modalities: Mapping[Modality, str] = field(default_factory=dict)
    num_embeds: int = 3
    preprocess_error: Exception | None = None
    num_pixels_of: dict[str, int] = field(default_factory=dict)  # by mm_hash; else 0
    orders: list[WriteOrder] = field(default_factory=list)

    def num_pixels(self, job: EncodeJob) -> int:
        return self.num_pixels_of.get(job.mm_hash, 0)

    async def preprocess(self, job: EncodeJob, media: bytes) -> PreparedItem:
        if self.preprocess_error is not None:
            raise self.preprocess_error
        assert media == MEDIA
        return PreparedItem(
            {}, self.num_embeds, self.num_embeds + 2, self.width, item_record(self.num_embeds, (1, 2, 2))
        )

    async def encode(self, prepared: PreparedItem, order: WriteOrder) -> None:
        self.orders.append(order)
        await self.on_encode(order)

    async def is_writing(self) -> bool:
        return False

    async def check_health(self) -> None:
        return


class FakeStoreClient:
    """`StoreClient`: a store of one item. Each try to reserve takes the next answer; then it succeeds.

    An answer is an error to raise, or "already sealed".
    """

    store = "store-0"

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.may_use_reserve: list[bool] = []  # of each try
        self.is_sealed = False
        self.capacity: int | None = None  # bytes
        self.watch_error: StoreError | None = None
        self.futures: list[asyncio.Future[int]] = []
        self.ended_pins: list[int] = []
        self.unwatched: list[tuple[str, int | None]] = []
        self.cancelled: list[int] = []
        self.num_reservations = 0
        self.num_pins = 0

    def can_hold(self, sizes: Iterable[int], memories: Sequence[str]) -> bool:
        return self.capacity is None or sum(sizes) <= self.capacity

    async def find_sealed(self, mm_hashes: Sequence[str], timeout_s: float) -> set[str]:
        return set(mm_hashes) if self.is_sealed else set()

    async def reserve_blocks(
        self,
        mm_hash: str,
        spec: TensorSpec,
        *,
        may_use_reserve: bool,
        memories: Sequence[str],
        timeout_s: float,
    ) -> Reserved | AlreadySealed:
        self.may_use_reserve.append(may_use_reserve)
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        if answer is not None or self.is_sealed:
            return AlreadySealed(seq=1, spec=spec)
        self.num_reservations += 1
        return Reserved(seq=1, reservation_id=self.num_reservations, offset=0, generation=1)

    async def watch_item(self, mm_hash: str, timeout_s: float) -> "asyncio.Future[int]":
        if self.watch_error is not None:
            raise self.watch_error
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.futures.append(future)
        if self.is_sealed:
            self.pin(future)
        return future

    def pin(self, future: "asyncio.Future[int]") -> None:
        self.num_pins += 1
        future.set_result(self.num_pins)

    async def seal(self, order: WriteOrder) -> None:
        self.is_sealed = True
        for future in self.futures:
            if not future.done():
                self.pin(future)

    def end_pins(self, pin_ids: list[int]) -> None:
        self.ended_pins += pin_ids

    def unwatch_item(self, mm_hash: str, reservation_id: int | None) -> None:
        self.unwatched.append((mm_hash, reservation_id))
        self.futures.clear()

    def cancel_reservation(self, reservation_id: int) -> None:
        self.cancelled.append(reservation_id)


class FakeReporter:
    """`Reporter`: remembers."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.error: Exception | None = None
        self.takes_metadata = asyncio.Event()
        self.takes_metadata.set()
        self.has_metadata = asyncio.Event()

    async def send_metadata(self, metadata: EncoderCacheMetadata, envelope: Envelope) -> None:
        await self.takes_metadata.wait()
        self._keep(metadata)
        self.has_metadata.set()

    async def send_completed(
        self, job: EncodeJob, envelope: Envelope, encode_s: float, requesters: Iterable[Requester]
    ) -> None:
        if list(requesters):
            self._keep(
                EncodeCompleted(job_id=job.job_id, mm_hash=job.mm_hash, encoder="e", encode_s=encode_s)
            )

    async def send_failed(
        self, failure: EncodeFailed, envelope: Envelope, requesters: Iterable[Requester]
    ) -> None:
        if list(requesters):
            self._keep((failure.job_id, failure.kind, failure.detail))

    def _keep(self, message: Any) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(message)

    @property
    def kinds(self) -> list[Any]:
        return [each[1] if isinstance(each, tuple) else each.TYPE for each in self.sent]


class Bench:
    """A job runner and its fakes."""

    def __init__(self, engine_timeout_s: float = 60.0, encode_batch: int = 1) -> None:
        self.store_client, self.reporter, self.ledger = FakeStoreClient(), FakeReporter(), Ledger()
        self.gateway_answers = asyncio.Event()
        self.gateway_answers.set()
        self.jobs = JobsModel()
        self.single_flight = FlightModel(self.jobs)
        self.engine = FakeEngine(self.store_client.seal)
        store_client: Any = self.store_client
        flights: Any = self.single_flight
        reporter: Any = self.reporter
        self.leases = JobLeases(flights, reporter, self.ledger, "encoder-0", 2.0)
        self.metrics = EncoderMetrics()
        self.gate = EncodeGate(GatePolicy(encode_batch), self.metrics)
        self.runner = JobRunner(
            self.engine,
            EngineWatchdog(engine_timeout_s, lambda: Activity(0.0, frozenset()), EngineFailedError),
            self.gate,
            CostBudget(PREPARED_PIXELS),
            MediaSource(httpx.AsyncClient(transport=httpx.MockTransport(self._serve)), 1000),
            store_client,
            StoreReservations(store_client, _region),
            self.leases,
            self.ledger,
            "encoder-0",
            DIGEST,
            JobTelemetry("encoder-0", self.metrics, EncodeSpeed(), FakeDelivery.stream),
        )

    async def _serve(self, request: httpx.Request) -> httpx.Response:
        """The gateway's media."""
        await self.gateway_answers.wait()
        return httpx.Response(404)

    def publish(self, delivery: FakeDelivery) -> None:
        """The job stands on the stream."""
        if isinstance(delivery.envelope.message, EncodeJob):
            self.jobs.stream.setdefault(delivery.entry_id, delivery.envelope.message)

    async def run(self, delivery: FakeDelivery) -> None:
        self.publish(delivery)
        await asyncio.wait_for(self.runner.run(delivery), 5)  # type: ignore[arg-type]

    async def claim(self, *request_ids: str) -> None:
        """These wait for the item, in this order, and the first published the job."""
        requesters = [requester(request_id) for request_id in request_ids]
        for index, each in enumerate(requesters):
            await self.single_flight.claim_flight(
                HASH,
                [each],
                namespace_digest=DIGEST,
                mode="new",
                job_id=f"job-{index}",
                attempt=1,
                max_attempts=2,
                ttl_s=10,
            )
            if index == 0:
                job = delivery_of("job-0", request_ids[0]).envelope.message
                assert isinstance(job, EncodeJob)
                assert await self.single_flight.publish_job(JobOffer(job)) == "1-1"


async def _region() -> list[str]:
    return [SHM]


def requester(request_id: str) -> Requester:
    return Requester(request_id=request_id, item_index=0, gateway="g-0", prefill_decode="pd-0")


def delivery_of(
    job_id: str = "job-1",
    request_id: str = "req-1",
    remaining_ms: int | None = 10_000,
    blob: bytes | None = MEDIA,
    namespace_digest: str = DIGEST,
    mm_hash: str = HASH,
) -> FakeDelivery:
    job = EncodeJob(
        job_id=job_id,
        mm_hash=mm_hash,
        modality=Modality.IMAGE,
        media_num_bytes=len(MEDIA),
        media_url=None if blob else "http://gateway/media",
        requesters=(requester(request_id),),
        namespace_digest=namespace_digest,
    )
    return FakeDelivery(Envelope(job, blob=blob, remaining_ms=remaining_ms, received_at=time.monotonic()))
