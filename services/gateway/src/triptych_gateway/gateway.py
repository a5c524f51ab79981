"""Parts of one running gateway: built, with their tasks, and closed at the end."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from triptych_common import release
from triptych_common.bus import AsyncBus
from triptych_common.coordination import (
    EntryDirectory,
    ItemNames,
    Registration,
    Registry,
    RequestCounts,
    SharedSizes,
    SingleFlight,
)
from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.messages import EncoderCacheMetadata, InstanceRecord, Role
from triptych_common.protocol.names import OWNER_GROUP
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.access.auth import ApiKeyEntry, ApiKeys, read_api_keys_file
from triptych_gateway.access.key_limiter import KeyLimiter
from triptych_gateway.access.request_limiter import RequestLimiter
from triptych_gateway.changed_file import ChangedFile
from triptych_gateway.decision.decision_policy import EncodeOverride
from triptych_gateway.decision.encode_decisions import EncodeDecisions
from triptych_gateway.decision.redis_reads import EncoderReturn, SharedQueue
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.final_acks import FinalAcks
from triptych_gateway.encode.job_window import EncodeCapacity, JobWindow
from triptych_gateway.encode.media_cache import MediaCache
from triptych_gateway.encode.scrape_gauges import StreamLags, WaitingWork
from triptych_gateway.encode.sizes import SizesCache
from triptych_gateway.fetch.fetcher import open_fetcher
from triptych_gateway.files.encode_ahead import EncodeAhead
from triptych_gateway.files.file_service import ExpirySweep, FileService
from triptych_gateway.files.file_store import FileStore
from triptych_gateway.files.uploads import FileUploads
from triptych_gateway.locality.encode_stores import EncodeStores
from triptych_gateway.locality.item_places import ItemPlaces
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.proxy.forward import Forwarder
from triptych_gateway.proxy.routing import RoutingHeaders
from triptych_gateway.proxy.services import AccessServices, MediaServices, Services
from triptych_gateway.proxy.stages import Stages
from triptych_gateway.request.chat_request import RequestOptions, RequestParser
from triptych_gateway.request.image_header import ImageLimits
from triptych_gateway.request.item_checks import MediaLimits
from triptych_gateway.request.media import MediaIntake
from triptych_gateway.request.named_items import NamedItems
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard
from triptych_gateway.responses.exchange import ResponseParts
from triptych_gateway.routing.instances import Instances
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.router import Router, open_router
from triptych_gateway.routing.served_models import ModelsFile, ServedModels, read_models_file
from triptych_gateway.settings import GatewaySettings
from triptych_gateway.tracing.recent_requests import RecentRequests
from triptych_gateway.tracing.trace_trust import TraceTrust
from triptych_gateway.transfers.fabric_view import FabricView, LinkRates
from triptych_gateway.transfers.place_finder import DirectoryNotes
from triptych_gateway.transfers.transfer_orders import TransferOrders
from triptych_gateway.upstream_client import new_client

log = get_logger(__name__)

RESULTS_PREFETCH = 64


@dataclass(frozen=True)
class Gateway:
    """A gateway whose tasks run. Routes take from it what they need."""

    settings: GatewaySettings
    view: RegistryView
    router: Router
    orders: EncodeOrders
    transfers: TransferOrders
    media_cache: MediaCache
    registration: Registration
    services: Services
    responses: ResponseParts
    stream_lags: StreamLags
    waiting_work: WaitingWork


@asynccontextmanager
async def run_gateway(settings: GatewaySettings) -> AsyncIterator[Gateway]:
    """Run a registered gateway with its tasks until the block ends.

    Results are taken until then, so end the block after the last request.

    Raises:
        BusUnavailableError: Redis could not be reached at the start.
        RunDirError: the directory of files cannot be used.
        ApiKeysFileError, ModelsFileError: the file of API keys, or of models, cannot be used.
        RoutingFileError: the file of routing profiles cannot be used.
    """
    bus = await AsyncBus.connect(settings.redis_url, settings.deployment, client_name=settings.instance)
    try:
        registry, metrics, media_cache = Registry(bus), GatewayMetrics(), MediaCache(settings.media_base_url)
        view = RegistryView(registry, settings.registry_interval_s)
        router = open_router(settings, metrics)
        models = ServedModels.of_file(settings.models_file)
        instances = Instances(view, router, settings, models)
        fabric, rates = FabricView(view), LinkRates()
        orders = EncodeOrders(
            single_flight=SingleFlight(bus),
            gateway=settings.instance,
            media_cache=media_cache,
            sizes=SizesCache(
                SharedSizes(bus, max_items=settings.sizes_redis_items, ttl_s=settings.sizes_ttl_s),
                settings.sizes_cache_items,
            ),
            settings=settings,
            window=JobWindow(EncodeCapacity(lambda: view.records).of),
            stores=EncodeStores(lambda: view.records, settings=settings, measured_s=rates.measured_s),
            metrics=metrics,
            places=ItemPlaces(lambda: fabric.are_apart),
        )
        # The directory is bounded as the sizes are: both have recent items.
        directory = EntryDirectory(bus, max_items=settings.sizes_redis_items, ttl_s=settings.sizes_ttl_s)
        transfers = TransferOrders(
            bus=bus,
            gateway=settings.instance,
            fabric=fabric,
            orders=orders,
            notes=DirectoryNotes(directory, settings.publish_timeout_s),
            rates=rates,
            settings=settings,
            metrics=metrics,
        )
        final_acks = FinalAcks(bus, settings.instance)
        access = _access(settings, bus, models, metrics)
        decisions = EncodeDecisions(
            mode=settings.encode_decision,
            override=EncodeOverride(settings.encode_override),
            view=view,
            router=router,
            orders=orders,
            encoder_return=EncoderReturn(registry, on_demand=settings.encoders_on_demand),
            shared_queue=SharedQueue(orders.flight_requests.read_backlog),
            metrics=metrics,
        )
        media_limits = MediaLimits(
            settings.max_item_bytes,
            ImageLimits(settings.max_image_pixels, settings.image_formats),
            settings.video_piece_rows,
        )
        with (
            ThreadPoolExecutor(settings.num_body_threads, thread_name_prefix="body") as body_threads,
            ThreadPoolExecutor(settings.num_media_threads, thread_name_prefix="media") as media_threads,
            ThreadPoolExecutor(settings.num_file_threads, thread_name_prefix="uploads") as upload_threads,
            ThreadPoolExecutor(settings.num_file_threads, thread_name_prefix="files") as file_threads,
            ThreadPoolExecutor(settings.num_file_threads, thread_name_prefix="file-lists") as list_threads,
        ):
            files: FileService | None = None
            if settings.files_dir is not None:
                store = FileStore(settings.files_dir, settings)
                ahead: EncodeAhead | None = None
                if settings.files_encode_ahead and settings.encode_decision != "local":
                    ahead = EncodeAhead(
                        orders=orders,
                        final_acks=final_acks,
                        view=view,
                        metrics=metrics,
                        timeout_s=settings.first_token_timeout_s,
                        video_piece_rows=settings.video_piece_rows,
                    )
                uploads = FileUploads(store, media_limits, access.limiter, upload_threads)
                expiry = ExpirySweep(store, list_threads)
                files = FileService(store, uploads, expiry, ahead, file_threads, list_threads, metrics)
            async with (
                new_client(settings.connect_timeout_s, settings.chunk_timeout_s) as http,
                open_fetcher(settings, media_threads, metrics) as fetcher,
            ):
                stages = Stages(http, router, decisions, metrics, body_threads, settings.max_answer_bytes)
                forwarder = Forwarder(instances, stages, transfers, metrics, settings.chunk_timeout_s)
                guard = PlaceholderGuard(
                    settings.placeholder_tokens, settings.max_body_values, instances.placeholder_tokens_of
                )
                options = RequestOptions(settings.request_processor_options, settings.media_options)
                services = Services(
                    settings=settings,
                    metrics=metrics,
                    access=access,
                    parser=RequestParser(guard, settings, options, body_threads),
                    media=MediaServices(
                        files,
                        MediaIntake(
                            media_limits,
                            media_threads,
                            fetcher,
                            NamedItems(ItemNames(bus), media_threads),
                            metrics,
                        ),
                        orders,
                        decisions,
                        final_acks,
                        transfers,
                    ),
                    instances=instances,
                    forwarder=forwarder,
                    http=http,
                    threads=body_threads,
                    recents=RecentRequests(settings.ui_recent_requests, settings.ui_listeners)
                    if settings.ui
                    else None,
                )
                responses = ResponseParts.open(settings, bus, view, files, file_threads)
                bus.on_server_changed(orders.check_all)
                await view.refresh()
                if files is not None:
                    await files.measure()
                work = [
                    _read_registry(view, router, decisions),
                    _read_results(
                        bus, settings.instance, orders, transfers, final_acks, decisions, services.recents
                    ),
                    transfers.run(),
                    final_acks.run_sender(),
                    orders.run_checks(),
                    orders.flight_requests.run_room_reads(),
                    *(orders.run_steps() for _ in range(settings.num_publishers)),
                    access.key_limiter.run(),
                    *_file_watches(settings, access.api_keys, models, list_threads),
                    *([] if files is None else files.tasks()),
                ]
                lags = StreamLags(bus, view, settings.instance, metrics, orders.queue)
                async with _running(work), registry.keep_registered(_record(settings)) as registration:
                    shared = settings, view, router, orders, transfers, media_cache
                    waiting_work = WaitingWork(orders, view, router, metrics)
                    yield Gateway(*shared, registration, services, responses, lags, waiting_work)
        await access.key_limiter.close()
        await registry.clear_inboxes(settings.instance)
    finally:
        await bus.close()


@asynccontextmanager
async def _running(work: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run background tasks. A task that fails cancels the block: the service ends and is restarted."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _read_registry(view: RegistryView, router: Router, decisions: EncodeDecisions) -> None:
    while True:
        await view.refresh()
        now = time.monotonic()
        seen = view.seen_lately(now)
        router.forget_all_but(seen)
        router.observe(view.records, now)
        decisions.load.forget_all_but(seen)
        await asyncio.sleep(view.interval_s)


async def _read_results(
    bus: AsyncBus,
    instance: str,
    orders: EncodeOrders,
    transfers: TransferOrders,
    final_acks: FinalAcks,
    decisions: EncodeDecisions,
    recents: RecentRequests | None,
) -> None:
    """Handle messages of encoders, prefill_decode instances and fabric agents, for ever."""
    async with bus.consumer(
        bus.names.encode_results(instance), group=OWNER_GROUP, consumer=instance, prefetch=RESULTS_PREFETCH
    ) as consumer:
        async for delivery in consumer:
            message = delivery.envelope.message
            try:
                if isinstance(message, EncoderCacheMetadata):
                    final_acks.on_metadata(message)
                decisions.on_encode_result(message)
                if recents is not None:
                    recents.on_encode_result(message)
                if not transfers.on_result(message):
                    await orders.on_encode_result(message)
            except Exception:  # one bad message must not stop the reader
                log.exception("encode result could not be handled", entry_id=delivery.entry_id)
            delivery.ack_soon()


def _file_watches(
    settings: GatewaySettings, api_keys: ApiKeys, models: ServedModels, threads: ThreadPoolExecutor
) -> Iterator[Coroutine[Any, Any, None]]:

    def replace_keys(entries: Sequence[ApiKeyEntry]) -> None:
        api_keys.replace_entries(entries)
        log.info("API keys read", num_keys=len(entries))

    def keep_keys(error: TriptychError) -> None:
        log.warning("file of API keys not usable, the former keys stay in force", error=str(error))

    def replace_models(content: ModelsFile) -> None:
        models.replace_content(content)
        log.info("models read", num_aliases=len(content.aliases), shares=content.shares)

    def keep_models(error: TriptychError) -> None:
        log.warning("file of models not usable, the former one stays in force", error=str(error))

    if (path := settings.api_keys_file) is not None:
        keys_file = ChangedFile(path, read_api_keys_file)
        yield keys_file.watch(settings.api_keys_check_s, threads, replace_keys, keep_keys)
    if (path := settings.models_file) is not None:
        models_file = ChangedFile(path, read_models_file)
        yield models_file.watch(settings.models_check_s, threads, replace_models, keep_models)


def _access(
    settings: GatewaySettings, bus: AsyncBus, models: ServedModels, metrics: GatewayMetrics
) -> AccessServices:
    keys = () if settings.api_keys_file is None else read_api_keys_file(settings.api_keys_file)
    limiter = RequestLimiter(settings.max_requests_in_flight, settings.max_media_in_flight_bytes)
    metrics.in_flight.set_function(lambda: limiter.num_requests)
    return AccessServices(
        TraceTrust(settings.trust_traceparent, settings.trust_traceparent_networks),
        RoutingHeaders(models, frozenset(settings.front_end_keys), settings.front_end_networks),
        ApiKeys(settings.api_keys, keys),
        limiter,
        KeyLimiter(RequestCounts(bus), metrics, settings),
    )


def _record(settings: GatewaySettings) -> InstanceRecord:
    return InstanceRecord(
        instance=settings.instance,
        release=release(),
        boot_id=uuid4().hex,
        role=Role.GATEWAY,
        url=settings.media_base_url,
        num_slots=settings.max_requests_in_flight,
        host=settings.host_name,
    )
