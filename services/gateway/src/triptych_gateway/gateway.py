"""Parts of one running gateway: built, with their tasks, and closed at the end."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registration, Registry, RequestCounts, SharedSizes, SingleFlight
from triptych_common.protocol.messages import EncoderCacheMetadata, InstanceRecord, Role
from triptych_common.protocol.names import OWNER_GROUP
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.access.api_keys_file import read_api_keys_file
from triptych_gateway.access.auth import ApiKeys
from triptych_gateway.access.key_limiter import KeyLimiter
from triptych_gateway.access.request_limiter import RequestLimiter
from triptych_gateway.chat.exchange import ChatParts
from triptych_gateway.chat.forward import Forwarder
from triptych_gateway.chat.media_serving import MediaServing
from triptych_gateway.chat.routing_headers import RoutingHeaders
from triptych_gateway.chat.stages import Stages
from triptych_gateway.decision.encode_decisions import EncodeDecisions
from triptych_gateway.decision.encode_override import EncodeOverride
from triptych_gateway.decision.shared_queue import SharedQueue
from triptych_gateway.encode.encode_job import OrderLimits
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.encoder_return import EncoderReturn
from triptych_gateway.encode.final_acks import FinalAcks
from triptych_gateway.encode.job_window import JobWindow
from triptych_gateway.encode.media_cache import MediaCache
from triptych_gateway.encode.sizes import SizesCache
from triptych_gateway.encode.stream_lags import StreamLags
from triptych_gateway.fetch.fetcher import open_fetcher
from triptych_gateway.fetch.options import FetchOptions
from triptych_gateway.files.file_service import FileService
from triptych_gateway.gateway_parts import (
    encode_ahead,
    file_service,
    file_watches,
    media_limits,
    request_parsers,
    transfer_orders,
)
from triptych_gateway.locality.encode_stores import EncodeStores, LinkDefaults
from triptych_gateway.locality.item_places import ItemPlaces
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.race import CutOff
from triptych_gateway.request.chat_request import RequestParser
from triptych_gateway.request.media import MediaIntake
from triptych_gateway.request.text_request import TextParser
from triptych_gateway.responses.exchange import ResponseParts
from triptych_gateway.routing.encode_capacity import EncodeCapacity
from triptych_gateway.routing.instances import Instances
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.router import Router
from triptych_gateway.routing.routing_report import open_router
from triptych_gateway.routing.served_models import ServedModels
from triptych_gateway.settings import GatewaySettings
from triptych_gateway.tracing.recent_requests import RecentRequests
from triptych_gateway.tracing.trace_trust import TraceTrust
from triptych_gateway.transfers.fabric_view import FabricView
from triptych_gateway.transfers.link_rates import LinkRates
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
    files: FileService | None
    chat: ChatParts
    responses: ResponseParts
    stream_lags: StreamLags


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
        registry, metrics, media_cache = Registry(bus), GatewayMetrics(), MediaCache()
        view = RegistryView(registry, settings.registry_interval_s)
        router = open_router(settings.suspect_s, settings.routing_file, metrics)
        models = ServedModels.of_file(settings.models_file)
        instances = Instances(
            view,
            router,
            settings.instance_grace_s,
            settings.max_dispatch_attempts,
            models,
            resends_to_last=settings.resend_to_last_instance,
        )
        fabric, rates = FabricView(view), LinkRates()
        orders = _encode_orders(settings, bus, media_cache, view, metrics, fabric, rates)
        transfers = transfer_orders(settings, bus, orders, fabric, rates, metrics)
        final_acks = FinalAcks(bus, settings.instance)
        limiter = RequestLimiter(settings.max_requests_in_flight, settings.max_media_in_flight_bytes)
        key_limiter = KeyLimiter(
            RequestCounts(bus),
            metrics,
            timeout_s=settings.limits_timeout_s,
            fails_open=settings.limits_without_redis == "open",
        )
        decisions = EncodeDecisions(
            mode=settings.encode_decision,
            override=EncodeOverride(settings.encode_override),
            view=view,
            router=router,
            orders=orders,
            encoder_return=EncoderReturn(registry),
            shared_queue=SharedQueue(orders.flight_requests.read_backlog),
            metrics=metrics,
        )
        with (
            ThreadPoolExecutor(settings.num_body_threads, thread_name_prefix="body") as body_threads,
            ThreadPoolExecutor(settings.num_media_threads, thread_name_prefix="media") as media_threads,
            ThreadPoolExecutor(settings.num_file_threads, thread_name_prefix="uploads") as upload_threads,
            ThreadPoolExecutor(settings.num_file_threads, thread_name_prefix="files") as file_threads,
            ThreadPoolExecutor(settings.num_file_threads, thread_name_prefix="file-lists") as list_threads,
        ):
            ahead = encode_ahead(settings, orders, final_acks, view, metrics)
            files = file_service(
                settings, limiter, ahead, upload_threads, file_threads, list_threads, metrics
            )
            async with (
                new_client(settings.connect_timeout_s, settings.chunk_timeout_s) as http,
                open_fetcher(FetchOptions.of(settings), media_threads, metrics) as fetcher,
            ):
                stages = Stages(http, router, decisions, metrics, body_threads, settings.max_answer_bytes)
                forwarder = Forwarder(instances, stages, transfers, metrics, settings.chunk_timeout_s)
                media_serving = MediaServing(
                    gateway=settings.instance,
                    files=files,
                    intake=MediaIntake(media_limits(settings), media_threads, fetcher),
                    instances=instances,
                    orders=orders,
                    decisions=decisions,
                    final_acks=final_acks,
                    transfers=transfers,
                    forwarder=forwarder,
                    http=http,
                    threads=body_threads,
                    metrics=metrics,
                    max_body_bytes=settings.max_body_bytes,
                    tokenize_timeout_s=settings.tokenize_timeout_s,
                    encoder_grace_s=settings.encoder_grace_s,
                    local_encode_after_s=settings.local_encode_after_s,
                )
                parsers = request_parsers(settings, body_threads, instances)
                chat = _chat_parts(
                    settings, metrics, limiter, key_limiter, parsers, instances, media_serving, forwarder
                )
                responses = ResponseParts.open(settings, bus, view, files, file_threads)
                bus.on_server_changed(orders.check_all)
                await view.refresh()
                if files is not None:
                    await files.measure()
                work = [
                    _read_registry(view, router, decisions),
                    _read_results(
                        bus, settings.instance, orders, transfers, final_acks, decisions, chat.recents
                    ),
                    transfers.run(),
                    final_acks.run_sender(),
                    orders.run_checks(),
                    orders.flight_requests.run_room_reads(),
                    *(orders.run_steps() for _ in range(settings.num_publishers)),
                    key_limiter.run(),
                    *file_watches(settings, chat.api_keys, models, list_threads),
                    *([] if files is None else files.tasks()),
                ]
                lags = StreamLags(bus, view, settings.instance, metrics, orders.queue)
                async with _running(work), registry.keep_registered(_record(settings)) as registration:
                    shared = settings, view, router, orders, transfers, media_cache
                    yield Gateway(*shared, registration, files, chat, responses, lags)
        await key_limiter.close()
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


def _encode_orders(
    settings: GatewaySettings,
    bus: AsyncBus,
    media: MediaCache,
    view: RegistryView,
    metrics: GatewayMetrics,
    fabric: FabricView,
    rates: LinkRates,
) -> EncodeOrders:
    link = LinkDefaults(settings.link_bytes_per_s, settings.link_round_trip_s)
    shared = SharedSizes(bus, max_items=settings.sizes_redis_items, ttl_s=settings.sizes_ttl_s)
    return EncodeOrders(
        single_flight=SingleFlight(bus),
        gateway=settings.instance,
        media_cache=media,
        sizes=SizesCache(shared, settings.sizes_cache_items),
        limits=OrderLimits(
            inline_media_bytes=settings.inline_media_bytes,
            media_base_url=settings.media_base_url,
            max_attempts=settings.max_encode_attempts,
            publish_timeout_s=settings.publish_timeout_s,
            max_queued_jobs=settings.max_queued_jobs,
            max_queue_age_s=settings.max_queue_age_s,
            flight_check_s=settings.flight_check_s,
        ),
        window=JobWindow(EncodeCapacity(lambda: view.records).of),
        stores=EncodeStores(lambda: view.records, link=link, measured_s=rates.measured_s),
        metrics=metrics,
        places=ItemPlaces(lambda: fabric.are_apart),
    )


def _chat_parts(
    settings: GatewaySettings,
    metrics: GatewayMetrics,
    limiter: RequestLimiter,
    key_limiter: KeyLimiter,
    parsers: tuple[RequestParser, TextParser],
    instances: Instances,
    media_serving: MediaServing,
    forwarder: Forwarder,
) -> ChatParts:
    keys = () if settings.api_keys_file is None else read_api_keys_file(settings.api_keys_file)
    metrics.in_flight.set_function(lambda: limiter.num_requests)
    return ChatParts(
        metrics=metrics,
        trace_trust=TraceTrust(settings.trust_traceparent, settings.trust_traceparent_networks),
        routing_headers=RoutingHeaders(
            instances.models, frozenset(settings.front_end_keys), settings.front_end_networks
        ),
        api_keys=ApiKeys(settings.api_keys, keys),
        limiter=limiter,
        key_limiter=key_limiter,
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.body_timeout_s,
        body_piece_timeout_s=settings.body_piece_timeout_s,
        parser=parsers[0],
        text_parser=parsers[1],
        first_token_timeout_s=settings.first_token_timeout_s,
        request_timeout_s=settings.request_timeout_s,
        instances=instances,
        media_serving=media_serving,
        forwarder=forwarder,
        chunk_timeout_s=settings.chunk_timeout_s,
        cut_off=CutOff(),
        recents=RecentRequests(settings.ui_recent_requests, settings.ui_listeners) if settings.ui else None,
    )


def _record(settings: GatewaySettings) -> InstanceRecord:
    return InstanceRecord(
        instance=settings.instance,
        boot_id=uuid4().hex,
        role=Role.GATEWAY,
        url=settings.media_base_url,
        num_slots=settings.max_requests_in_flight,
        host=settings.host_name,
    )
