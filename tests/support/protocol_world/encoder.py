"""The real encoder but for vLLM: `JobRunner`, `StoreClient`, `Ledger`, `Reporter`, `ReplyReader`."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tests.support.flight_model import FlightModel
from tests.support.item_records import IMAGE_LIMITS, item_record
from tests.support.protocol_world.flights import FlightLink
from tests.support.protocol_world.network import DIGEST, NAMES, AsyncBusModel, JobEntry, Network
from tests.support.protocol_world.store import ClientSession, StoreActor
from tests.support.protocol_world.virtual_loop import CLOCK, VirtualLoop
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeJob, Message, Modality
from triptych_common.protocol.store import SHM, Cancel, Seal
from triptych_common.runtime.liveness import Activity
from triptych_encoder.encoding import EncodeRefusedError, EngineFailedError, PreparedItem
from triptych_encoder.jobs.encode_gate import EncodeGate
from triptych_encoder.jobs.gate_policy import GatePolicy
from triptych_encoder.jobs.job_leases import JobLeases
from triptych_encoder.jobs.job_runner import JobRunner
from triptych_encoder.jobs.job_telemetry import EncodeSpeed, JobTelemetry
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.jobs.media_source import MediaSource
from triptych_encoder.jobs.reply_reader import ReplyReader
from triptych_encoder.jobs.reporter import Reporter
from triptych_encoder.metrics import EncoderMetrics
from triptych_encoder.preprocessing.cost_budget import CostBudget
from triptych_encoder.store.store_client import StoreClient
from triptych_encoder.store.store_reservations import StoreReservations
from triptych_vllm_connector.host.engine_watchdog import EngineWatchdog
from triptych_vllm_connector.step_orders import WriteOrder

WIDTH, DTYPE = 4, "float32"
LEASE_S = 6.0
ENGINE_TIMEOUT_S = 60.0
METRICS = EncoderMetrics()


def content_of(mm_hash: str, num_embeds: int) -> bytes:
    """The bytes of an item's tensor."""
    return bytes.fromhex(mm_hash)[-1:] * (num_embeds * WIDTH * 4)


class JobDelivery:
    """`Delivery` of one job."""

    def __init__(self, entry: JobEntry, encoder: "EncoderActor") -> None:
        self.stream = entry.stream
        self.entry_id = str(entry.number)
        self.num_deliveries = entry.num_deliveries
        self.envelope: Envelope = entry.envelope(CLOCK.now)
        self._entry = entry
        self._encoder = encoder
        self._loop = encoder.loop

    async def ack(self) -> None:
        if not self._loop.is_dead:
            await self._encoder.redis.ack(self._entry.message.mm_hash, self._entry.number)
            self._encoder.outstanding.discard(self._entry.number)

    async def hand_back(self) -> None:
        """Only a process that is being killed cancels jobs here."""
        assert self._loop.is_dead


class EngineModel:
    """vLLM of the encoder: preprocesses at once, encodes when the world orders it."""

    dtype = DTYPE
    max_num_tokens = 1000
    item_limits = IMAGE_LIMITS
    unserved_modalities: Mapping[Modality, str] = MappingProxyType({})
    max_item_embeds = 500

    def __init__(self, rows: dict[str, int]) -> None:
        self._rows = rows
        self.pending: dict[str, tuple[WriteOrder, asyncio.Future[None]]] = {}  # by mm_hash

    def num_pixels(self, job: EncodeJob) -> int:
        return job.image.num_pixels if job.image is not None else 0

    async def preprocess(self, job: EncodeJob, media: bytes) -> PreparedItem:
        num_embeds = self._rows[job.mm_hash]
        return PreparedItem({}, num_embeds, num_embeds + 2, WIDTH, item_record(num_embeds))

    async def encode(self, prepared: PreparedItem, order: WriteOrder) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        assert order.mm_hash not in self.pending, "one item is encoded twice at once"
        self.pending[order.mm_hash] = (order, future)
        await future

    async def is_writing(self) -> bool:
        return False

    async def check_health(self) -> None:
        return


class EncoderActor:
    """One encoder, with its worker. Starts running; `crash` and `start` as often as one likes."""

    def __init__(
        self, name: str, network: Network, store: StoreActor, rows: dict[str, int], num_slots: int
    ) -> None:
        self.name = name
        self._network = network
        self.store = store
        self.stream = FlightModel._names.encode_jobs(DIGEST, store.name)
        self._rows = rows
        self._num_slots = num_slots
        self.is_up = False
        self.num_encodes: dict[str, int] = {}
        self.start()

    def start(self) -> None:
        self.is_up, self.must_end, self.is_frozen = True, False, False
        self.loop = VirtualLoop(self.name)
        self.redis = FlightLink(self._network, self.loop)
        self._mapping = self.store.map_region()
        self.outstanding: set[int] = set()
        self.bus: Any = AsyncBusModel(self._network, self.name)
        self.ledger = Ledger()
        self.engine = EngineModel(self._rows)
        self.store_client: StoreClient
        self.host = ClientSession(
            self.store,
            f"{self.name}/host",
            self.loop.create_future,
            lambda push: self.store_client.on_push(push),  # noqa: PLW0108 -- it is made next
            self._lost,
        )
        self.store_client = StoreClient(self.name, self.host, asyncio.Event())  # type: ignore[arg-type]
        self.worker = ClientSession(self.store, f"{self.name}/worker-0", self.loop.create_future)
        redis: Any = self.redis
        reporter = Reporter(self.bus, NAMES, self.name)  # type: ignore[arg-type]
        self.leases = JobLeases(redis, reporter, self.ledger, self.name, LEASE_S)
        self.runner = JobRunner(
            self.engine,
            EngineWatchdog(ENGINE_TIMEOUT_S, lambda: Activity(0.0, frozenset()), EngineFailedError),
            EncodeGate(GatePolicy(encode_batch=1), METRICS),
            CostBudget(64_000_000),
            MediaSource(None, 1000),  # type: ignore[arg-type]
            self.store_client,
            StoreReservations(self.store_client, self._memories),
            self.leases,
            self.ledger,
            self.name,
            DIGEST,
            JobTelemetry(self.name, METRICS, EncodeSpeed(), self.stream),
        )
        self.loop.run(lambda: self.loop.keep_up(self.leases.run(), lambda: bool(self.leases._renewed)))
        self.replies = ReplyReader(self.bus, NAMES, self.name, self.ledger, self.store_client)  # type: ignore[arg-type]

    @property
    def sessions(self) -> tuple[ClientSession, ...]:
        return (self.host, self.worker)

    def crash(self) -> None:
        self.is_up = False
        self.bus.network = None
        self.redis.scripts.clear()
        for session in self.sessions:
            session.kill()
        self.loop.kill()
        self.outstanding = set()

    async def _memories(self) -> list[str]:
        return [SHM]

    def _lost(self) -> None:
        """The lease is lost: the service ends."""
        self.must_end = True

    # ---- transitions -----------------------------------------------------------------------------
    def takes(self) -> list[tuple[JobEntry, str]]:
        """Jobs that it may take now, and how: new, its own from before, or taken over."""
        if not self.is_up or len(self.outstanding) >= self._num_slots:
            return []
        found: list[tuple[JobEntry, str]] = []
        has_new = False
        for entry in self._network.jobs.values():
            if entry.stream != self.stream:
                continue
            if entry.owner is None:
                if not has_new:
                    found.append((entry, "new"))
                has_new = True
            elif entry.owner == self.name and entry.number not in self.outstanding:
                found.append((entry, "own"))
        return found

    def take(self, entry: JobEntry) -> None:
        entry.owner = self.name
        entry.num_deliveries += 1
        self.outstanding.add(entry.number)
        self.loop.run(lambda: self.loop.create_task(self._work_on(JobDelivery(entry, self))))

    async def _work_on(self, delivery: Any) -> None:
        try:
            await self.runner.run(delivery)
        except EngineFailedError:  # it hung: the service ends
            self.must_end = True
        except Exception as error:
            self.loop.errors.append(error)

    def receive(self, message: Message) -> None:
        self.loop.run(lambda: self.replies.on_reply(message))

    def encode(self, mm_hash: str, how: str = "seals") -> None:
        """The engine's step for one item: the worker writes and seals, or does not; or vLLM refuses."""
        order, future = self.engine.pending.pop(mm_hash)
        if how == "seals":
            self.num_encodes[mm_hash] = self.num_encodes.get(mm_hash, 0) + 1
            if self._mapping is not None:
                self._mapping.write(order, content_of(mm_hash, order.num_embeds))
            self.worker.submit(Seal(seq=0, reservation_id=order.reservation_id))
        elif how == "unfit":
            self.worker.submit(Cancel(seq=0, reservation_id=order.reservation_id))

        def done() -> None:
            if future.done():
                return
            if how == "refused":
                future.set_exception(EncodeRefusedError("refused"))
            else:
                future.set_result(None)

        self.loop.run(done)

    def next_timer(self, *, with_upkeep: bool = True) -> float | None:
        both = self.loop.next_timer(with_upkeep=with_upkeep), self.ledger.next_deadline()
        return min((when for when in both if when is not None), default=None) if self.is_up else None

    def run_due(self) -> None:
        if self.is_up:
            self.loop.run_due()
            self.loop.run(lambda: self.store_client.end_pins(self.ledger.expire(CLOCK.now)))
