"""The parts of one running gateway, put together. Owns what must be closed and the tasks that must run."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import uuid4

import httpx

from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registration, Registry, SharedSizes, SingleFlight
from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import EncoderCacheMetadata, InstanceRecord, Role
from triptych_common.protocol.names import OWNER_GROUP
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.access.admission import Admission
from triptych_gateway.access.api_keys_file import read_api_keys_file
from triptych_gateway.access.auth import ApiKeys
from triptych_gateway.chat.upstream import new_client
from triptych_gateway.encode.encode_job import OrderLimits
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.final_acks import FinalAcks
from triptych_gateway.encode.media_cache import MediaShelf
from triptych_gateway.encode.sizes import SizesCache
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.openai_errors import unavailable
from triptych_gateway.request.chat_request import RequestLimits
from triptych_gateway.request.image_header import ImageLimits
from triptych_gateway.request.json_bounds import BodyBounds
from triptych_gateway.request.media import MediaLimits
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard
from triptych_gateway.request.request_options import RequestOptions
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.router import Router
from triptych_gateway.settings import GatewaySettings

log = get_logger(__name__)

RESULTS_PREFETCH = 64


@dataclass
class Gateway:
    """Everything that serving a request needs."""

    settings: GatewaySettings
    bus: AsyncBus
    view: RegistryView
    router: Router
    orders: EncodeOrders
    last_words: FinalAcks
    shelf: MediaShelf
    admission: Admission
    api_keys: ApiKeys
    placeholder_guard: PlaceholderGuard
    request_options: RequestOptions
    media_limits: MediaLimits
    request_limits: RequestLimits
    body_threads: ThreadPoolExecutor
    media_threads: ThreadPoolExecutor
    http: httpx.AsyncClient
    metrics: GatewayMetrics
    registration: Registration | None = None
    is_draining: bool = False
    cut_off: asyncio.Event = field(default_factory=asyncio.Event)  # the time to drain is over

    async def announce_draining(self) -> None:
        """Not ready any more, for balancers; draining in the registry."""
        self.is_draining = True
        if self.registration is not None:
            await self.registration.announce_draining()

    async def wait_cut_off(self) -> None:
        """A guard: raises when the gateway waits for running requests no longer.

        Raises:
            RequestError: what the caller shall see.
        """
        await self.cut_off.wait()
        raise unavailable("draining", "this gateway is going away; send the request again")

    async def listen(self) -> None:
        """Take what encoders and prefill_decode instances say. Never returns."""
        names, instance = self.bus.names, self.settings.instance
        async with self.bus.consumer(
            names.encode_results(instance), group=OWNER_GROUP, consumer=instance, prefetch=RESULTS_PREFETCH
        ) as consumer:
            async for delivery in consumer:
                try:
                    if isinstance(delivery.envelope.message, EncoderCacheMetadata):
                        self.last_words.hear(delivery.envelope.message)
                    await self.orders.handle(delivery.envelope.message)
                except Exception:  # one bad message must not stop the listener
                    log.exception("encode result could not be handled", entry_id=delivery.entry_id)
                delivery.ack_soon()

    def on_look(self) -> None:
        """After each look at the registry."""
        self.router.forget({record.instance for record in self.view.records})


@asynccontextmanager
async def run_gateway(settings: GatewaySettings) -> AsyncIterator[Gateway]:
    """A gateway with its tasks running, registered; all of it ended when the block ends.

    Results are taken until then, so end the block after the last request.

    Raises:
        BusUnavailableError: Redis could not be reached at the start.
        ApiKeysFileError: the file of API keys cannot be used.
    """
    bus = await AsyncBus.connect(settings.redis_url, settings.deployment, client_name=settings.instance)
    try:
        registry = Registry(bus)
        with (
            ThreadPoolExecutor(settings.num_body_threads, thread_name_prefix="body") as body_threads,
            ThreadPoolExecutor(settings.num_media_threads, thread_name_prefix="media") as media_threads,
        ):
            async with new_client(settings.connect_timeout_s, settings.chunk_timeout_s) as http:
                gateway = _assemble(settings, bus, registry, body_threads, media_threads, http)
                await gateway.view.refresh()
                async with _running(gateway), registry.keep_registered(_record(settings)) as registration:
                    gateway.registration = registration
                    yield gateway
        await registry.clear_inboxes(settings.instance)
    finally:
        await bus.close()


@asynccontextmanager
async def _running(gateway: Gateway) -> AsyncIterator[None]:
    """The background tasks. A task that fails cancels the block: the service ends, and is restarted."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(gateway.view.run(gateway.on_look), name="registry-view"),
            group.create_task(gateway.listen(), name="results"),
            group.create_task(gateway.last_words.run(), name="last-words"),
            group.create_task(gateway.orders.flights.run_checks(), name="flight-checks"),
        ]
        tasks += [
            group.create_task(gateway.orders.flights.run(), name=f"publisher-{index}")
            for index in range(gateway.settings.num_publishers)
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


def _assemble(
    settings: GatewaySettings,
    bus: AsyncBus,
    registry: Registry,
    body_threads: ThreadPoolExecutor,
    media_threads: ThreadPoolExecutor,
    http: httpx.AsyncClient,
) -> Gateway:
    metrics = GatewayMetrics()
    shelf = MediaShelf()
    orders = EncodeOrders(
        inflight=SingleFlight(bus),
        gateway=settings.instance,
        shelf=shelf,
        sizes=SizesCache(
            SharedSizes(bus, max_items=settings.sizes_redis_items, ttl_s=settings.sizes_ttl_s),
            settings.sizes_cache_items,
        ),
        limits=OrderLimits(
            inline_media_bytes=settings.inline_media_bytes,
            media_base_url=settings.media_base_url,
            max_attempts=settings.max_encode_attempts,
            publish_timeout_s=settings.publish_timeout_s,
            max_queued_jobs=settings.max_queued_jobs,
            max_queue_age_s=settings.max_queue_age_s,
            flight_check_s=settings.flight_check_s,
        ),
        metrics=metrics,
    )
    bus.on_server_changed(orders.flights.check_all)
    return Gateway(
        settings=settings,
        bus=bus,
        view=RegistryView(registry, settings.registry_interval_s),
        router=Router(settings.suspect_s),
        orders=orders,
        last_words=FinalAcks(bus, settings.instance),
        shelf=shelf,
        admission=Admission(settings.max_requests_in_flight, settings.max_media_in_flight_bytes),
        api_keys=_api_keys(settings),
        placeholder_guard=PlaceholderGuard(settings.placeholder_tokens, settings.max_body_values),
        request_options=RequestOptions(settings.request_processor_options, settings.request_image_options),
        media_limits=MediaLimits(
            settings.max_item_bytes, ImageLimits(settings.max_image_pixels, settings.image_formats)
        ),
        request_limits=RequestLimits(
            BodyBounds(settings.max_prompt_bytes, settings.max_body_values),
            settings.max_messages,
            settings.max_choices,
        ),
        body_threads=body_threads,
        media_threads=media_threads,
        http=http,
        metrics=metrics,
    )


def _api_keys(settings: GatewaySettings) -> ApiKeys:
    entries = () if settings.api_keys_file is None else read_api_keys_file(settings.api_keys_file)
    return ApiKeys(settings.api_keys, entries)


def _record(settings: GatewaySettings) -> InstanceRecord:
    return InstanceRecord(
        instance=settings.instance,
        boot_id=uuid4().hex,
        role=Role.GATEWAY,
        url=settings.media_base_url,
        num_slots=settings.max_requests_in_flight,
    )


def unknown_model(gateway: Gateway, model: str) -> RequestError:
    """For a model that nobody serves now: 404; 503 if somebody did before, or nothing is served at all."""
    if gateway.view.models and model not in gateway.view.models_seen:
        return RequestError(404, "model_not_found", f"the model {model[:200]!r} does not exist", "model")
    return RequestError(503, "no_instance", "no instance that serves this model is available", "model")
