"""The real gateway from the known items to the answer's end: `EncodeOrders`, `ItemWait`, `race`.

In front of it HTTP, media and validation are left out; behind it `forward` is played: one frame is the
whole first chunk, another the end of the answer.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from tests.support.protocol_world.flights import FlightLink
from tests.support.protocol_world.network import DIGEST, AsyncBusModel, Network, SizesModel
from tests.support.protocol_world.virtual_loop import CLOCK, VirtualLoop
from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import MmHash, RequestId
from triptych_common.protocol.messages import EncoderCacheMetadata, InstanceRecord, Message, Modality
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.final_acks import FinalAcks
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.encode.job_window import Capacity, JobWindow
from triptych_gateway.encode.media_cache import MediaCache
from triptych_gateway.encode.sizes import SizesCache
from triptych_gateway.errors import unavailable
from triptych_gateway.locality.encode_stores import EncodeStores
from triptych_gateway.locality.item_places import ItemPlaces
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.race import race
from triptych_gateway.request.content_parts import MediaPart, format_place
from triptych_gateway.request.image_header import ImageHeader
from triptych_gateway.request.media import TakenItem
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.settings import EncodeSettings, TransferSettings

METRICS = GatewayMetrics()
FIRST_TOKEN_S = 30.0
FLIGHT_CHECK_S = 6.0  # a claim whose owner vanished is over by then
NUM_PUBLISHERS = 2
MAX_DISPATCHES = 2
CONNECTION_LOST = "connection lost"  # what a client sees when its gateway dies

ListRecords = Callable[[], Sequence[InstanceRecord]]


class BrokenError(Exception):
    """The instance went away."""


@dataclass
class ClientRequest:
    """One request of a client. `outcome`: `answer`, `cancelled`, an error's code, or None: still open."""

    request_id: str
    gateway: str
    hashes: tuple[str, ...]
    consumers: tuple[str, ...]  # in the order in which the router names them
    outcome: str | None = None
    has_begun: bool = False  # the first chunk has reached the client
    task: Any = None
    frames: Any = None  # asyncio.Queue of what prefill_decode sends
    dispatched: list[tuple[str, int]] = field(default_factory=list)  # (instance, attempt)
    conversation: str = ""
    num_turns: int = 0  # of the conversation before it
    ends: Counter[str] = field(default_factory=Counter)  # of what it was sent, how many ended how


class GatewayActor:
    """One gateway. `crash` and `start` any number of times."""

    def __init__(self, name: str, network: Network, is_reachable: Any, max_attempts: int) -> None:
        self.name = name
        self._network = network
        self._is_reachable = is_reachable
        self._max_attempts = max_attempts
        self.is_up = False
        self.start()

    def start(self) -> None:
        self.is_up = True
        self.loop = VirtualLoop(self.name)
        self.redis = FlightLink(self._network, self.loop)
        self.bus: Any = AsyncBusModel(self._network, self.name)
        self.media_cache = MediaCache(f"http://{self.name}")
        stores, places = self._find_stores()
        self.open: dict[str, ClientRequest] = {}
        self.orders = EncodeOrders(
            single_flight=cast("Any", self.redis),
            gateway=self.name,
            media_cache=self.media_cache,
            sizes=SizesCache(SizesModel(self.bus), 100),  # type: ignore[arg-type]
            settings=EncodeSettings(
                inline_media_bytes=100,
                max_encode_attempts=self._max_attempts,
                publish_timeout_s=5.0,
                max_queued_jobs=100,
                max_queue_age_s=100.0,
                flight_check_s=FLIGHT_CHECK_S,
            ),
            window=JobWindow(lambda digest: Capacity(num_slots=100, num_spare=0, num_gateways=1)),
            stores=stores,
            metrics=METRICS,
            places=places,
        )
        self.final_acks = FinalAcks(self.bus, self.name)  # type: ignore[arg-type]
        for _ in range(NUM_PUBLISHERS):
            self.loop.run(lambda: self.loop.create_task(self.orders.run_steps()))
        self.loop.run(lambda: self.loop.keep_up(self.orders.run_checks(), self._has_to_check))
        self.loop.run(lambda: self.loop.create_task(self.final_acks.run_sender()))

    def _find_stores(self) -> tuple[EncodeStores, ItemPlaces | None]:
        """What it knows of stores: there is one."""
        return EncodeStores(tuple, settings=TransferSettings()), None

    def _has_to_check(self) -> bool:
        """Does it, or does Redis, have a requester here?"""
        return bool(len(self.orders.flight_requests)) or any(item.in_flight for item in self.orders.table)

    def crash(self) -> None:
        self.is_up = False
        self.bus.network = None
        self.redis.scripts.clear()
        for request in self.open.values():
            request.outcome = CONNECTION_LOST
            self._abort(request)
        self.open = {}
        self.loop.kill()

    # ---- transitions -----------------------------------------------------------------------------
    def arrive(self, request: ClientRequest) -> None:
        self.open[request.request_id] = request

        def begin() -> None:
            request.frames = asyncio.Queue()
            request.task = self.loop.create_task(self._exchange(request))

        self.loop.run(begin)

    def cancel(self, request: ClientRequest) -> None:
        """The client goes away."""
        self.loop.run(request.task.cancel)

    def receive_result(self, message: Message) -> None:
        async def handle() -> None:
            try:
                if isinstance(message, EncoderCacheMetadata):
                    self.final_acks.on_metadata(message)
                await self._on_result(message)
            except Exception as error:  # the service would log it, and read on
                self.loop.errors.append(error)

        self.loop.run(lambda: self.loop.create_task(handle()))

    async def _on_result(self, message: Message) -> None:
        await self.orders.on_encode_result(message)

    def receive_frame(self, frame: tuple[str, str, int]) -> None:
        """(what, request id, attempt) of prefill_decode."""
        what, request_id, attempt = frame
        request = self.open.get(request_id)
        if request is not None and request.outcome is None and attempt == len(request.dispatched):
            self.loop.run(lambda: request.frames.put_nowait(what))

    def next_timer(self, *, with_upkeep: bool = True) -> float | None:
        return self.loop.next_timer(with_upkeep=with_upkeep) if self.is_up else None

    def run_due(self) -> None:
        if self.is_up:
            self.loop.run_due()

    # ---- one request -----------------------------------------------------------------------------
    async def _exchange(self, request: ClientRequest) -> None:
        loop = self.loop
        try:
            await self._serve_items(request)
            outcome = "answer"
        except RequestError as error:
            outcome = error.code
        except TimeoutError:
            outcome = "deadline_exceeded"
        except asyncio.CancelledError:
            outcome = "cancelled"
        if not loop.is_dead:
            request.outcome = outcome
            del self.open[request.request_id]

    async def _serve_items(self, request: ClientRequest) -> None:
        first = next((name for name in request.consumers if self._is_reachable(name)), request.consumers[0])
        items = tuple(_taken(mm_hash, index) for index, mm_hash in enumerate(request.hashes))
        deadline = CLOCK.now + FIRST_TOKEN_S
        item_wait = ItemWait(RequestId(request.request_id), first, items, deadline, None, DIGEST)
        async with self._open_wait(item_wait):
            async with asyncio.timeout_at(deadline):
                self.orders.order_missing(item_wait)
                await race(item_wait.wait_sizes(), item_wait.wait_failure())
            await race(self._serve(request, item_wait, first), item_wait.wait_failure())

    @asynccontextmanager
    async def _open_wait(self, item_wait: ItemWait) -> AsyncIterator[None]:
        async with self.final_acks.hold_acks(item_wait), self.orders.open_wait(item_wait):
            yield

    async def _bring(self, item_wait: ItemWait, name: str) -> None:
        """The request is about to go to that instance: the items are in its store, or come there."""

    async def _serve(self, request: ClientRequest, item_wait: ItemWait, first: str) -> None:
        tried: list[str] = []
        while True:
            left = [name for name in request.consumers if name not in tried and self._is_reachable(name)]
            name = first if not tried else next(iter(left), None)
            if name is None or len(tried) >= MAX_DISPATCHES:
                raise unavailable("instance_unreachable", "the serving instance cannot be reached")
            tried.append(name)
            try:
                await self._attempt(request, item_wait, name)
            except BrokenError:
                if request.has_begun:
                    raise RequestError(503, "stream_broken", "an error event ends the stream") from None
                continue
            return

    async def _attempt(self, request: ClientRequest, item_wait: ItemWait, name: str) -> None:
        await self._bring(item_wait, name)
        request.dispatched.append((name, len(request.dispatched) + 1))
        request.frames = asyncio.Queue()
        remaining_ms = max(1, int((item_wait.deadline - CLOCK.now) * 1000))
        rows = tuple((mm_hash, item_wait.sizes[MmHash(mm_hash)].num_embeds) for mm_hash in request.hashes)
        if self._is_reachable(name):
            frame = ("dispatch", request.request_id, len(request.dispatched), (remaining_ms, rows))
            self._network.send((self.name, name, "http"), frame)
        else:
            raise BrokenError
        has_ended, loop = False, self.loop
        try:
            async with asyncio.timeout_at(item_wait.deadline):
                what = await request.frames.get()
            if what == "first":
                item_wait.on_answer_began()
                request.has_begun = True
                what = await request.frames.get()
            has_ended = True
            if what == "answer":
                item_wait.on_answered(name)
            if what == "broken":
                raise BrokenError
            if what == "error":
                raise unavailable("generation_failed", "the model failed at this request")
        finally:
            if not has_ended and not loop.is_dead:
                self._abort(request)

    def _abort(self, request: ClientRequest) -> None:
        """The connection is closed."""
        if request.dispatched:
            name, attempt = request.dispatched[-1]
            if self._is_reachable(name):
                self._network.send((self.name, name, "http"), ("abort", request.request_id, attempt, ()))


def _taken(mm_hash: str, index: int) -> TakenItem:
    place = ("messages", 0, "content", index)
    part = MediaPart(index, place, Modality.IMAGE, "", format_place(place))
    return TakenItem(part, MmHash(mm_hash), b"media", ImageHeader("PNG", 1, 1), {}, {})


class RegistryGateway(GatewayActor):
    """A gateway that knows instances by the registry as last read. `list_records`: the registry's, now."""

    view: RegistryView

    def __init__(
        self, name: str, network: Network, is_reachable: Any, max_attempts: int, list_records: ListRecords
    ) -> None:
        self._list_records = list_records
        super().__init__(name, network, is_reachable, max_attempts)

    async def list_instances(self) -> Sequence[InstanceRecord]:
        """As `Registry`."""
        return self._list_records()

    def read_registry(self) -> None:
        def read() -> None:
            self.loop.create_task(self.view.refresh())

        self.loop.run(read)
