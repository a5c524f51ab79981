"""The encoder's life: engine, store, bus, registry; then jobs until it is told to stop."""

import asyncio
import contextlib
import uuid

import httpx

from triptych_common.bus import AsyncBus, Registry
from triptych_common.domain.errors import StoreUnavailableError, TriptychError
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_common.protocol.names import ENCODERS_GROUP
from triptych_common.runtime import StopSignal
from triptych_common.telemetry import setup_logging, setup_tracing
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.encoding import Encoder
from triptych_encoder.hand_over import HandOver
from triptych_encoder.job import JobRunner
from triptych_encoder.ledger import Ledger
from triptych_encoder.media_source import MediaSource
from triptych_encoder.pairing import Pairing
from triptych_encoder.replies import ReplyListener
from triptych_encoder.reporter import Reporter
from triptych_encoder.settings import EncoderSettings
from triptych_vllm_connector.abilities import ability
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.engine_options import encoder_options
from triptych_vllm_connector.namespace import digest_of_model
from triptych_vllm_connector.platform import has_gpu, slab_device
from triptych_vllm_connector.probing import has_region

log = get_logger(__name__)

MEDIA_TIMEOUT_S = 10.0
HEALTH_CHECK_S = 1.0  # vLLM tells of a dead engine only when asked


async def serve(settings: EncoderSettings, stop: StopSignal) -> None:
    """Run until `stop` is set, then finish the jobs in hand within the drain timeout.

    Raises:
        TriptychError: vLLM, the store or Redis cannot be used; the caller exits and is restarted.
    """
    from triptych_encoder.engine import run_engine  # vLLM: `work` runs without it, on any `Encoder`

    setup_logging("encoder", settings.instance, settings.log_level)
    digest = await asyncio.to_thread(digest_of_model, settings.model, settings.engine_args)
    config = ConnectorConfig(
        instance=settings.instance,
        deployment=settings.deployment,
        redis_url=settings.redis_url,
        store_socket=settings.store_socket,
        log_level=settings.log_level,
        traces_dir=settings.traces_dir,
        otlp_endpoint=settings.otlp_endpoint,
        namespace_digest=digest,
        has_encoder=True,
        transport=settings.transport,
        device=slab_device(settings.engine_args),
        debug_encode_delay_s=settings.debug_encode_delay_ms / 1000,
    )
    options = encoder_options(config, settings.model, settings.num_slots, has_gpu(), settings.engine_args)
    async with run_engine(options) as engine:  # first: vLLM may fork, and nothing of ours runs yet
        tracing = setup_tracing(
            "encoder", settings.instance, otlp_endpoint=settings.otlp_endpoint, traces_dir=settings.traces_dir
        )
        try:
            await work(settings, digest, engine, stop, config.device)
        finally:
            await asyncio.to_thread(tracing.shutdown)


async def work(
    settings: EncoderSettings, digest: str, engine: Encoder, stop: StopSignal, device: str | None = None
) -> None:
    """The life around a running engine. `device`: UUID of its GPU, where it has one of its own.

    Raises:
        TriptychError: the engine, the store or Redis cannot be used.
    """
    names = settings.names
    own = ability(
        settings.transport,
        device=device,
        has_region=await asyncio.to_thread(has_region, settings.store_socket, settings.instance),
    )
    store_lost = asyncio.Event()
    hand_over = await HandOver.connect(
        settings.store_socket, settings.instance, digest, lambda error: store_lost.set()
    )
    bus = await AsyncBus.connect(settings.redis_url, settings.deployment, client_name=settings.instance)
    ledger = Ledger()
    record = InstanceRecord(
        instance=settings.instance,
        boot_id=uuid.uuid4().hex,
        role=Role.ENCODE,
        model=settings.model.rstrip("/").rsplit("/", 1)[-1],
        namespace_digest=digest,
        width=engine.width,
        dtype=engine.dtype,
        max_item_embeds=engine.max_num_tokens,
        store=hand_over.store,
        num_slots=settings.num_slots,
        transports=own.transports,
        device=own.device,
    )
    registry = Registry(bus)
    pairing = Pairing(own, digest, registry, lambda: hand_over.slab)
    try:
        async with httpx.AsyncClient(timeout=MEDIA_TIMEOUT_S, trust_env=False) as http:
            runner = JobRunner(
                engine,
                MediaSource(http, settings.max_media_bytes),
                hand_over,
                Reporter(bus, names, settings.instance),
                ledger,
                settings.instance,
                digest,
                pairing.memories,
            )
            listener = ReplyListener(bus, names, settings.instance, ledger, hand_over)
            async with registry.keep_registered(record):
                log.info(
                    "encoder ready",
                    num_slots=settings.num_slots,
                    transports=[each.value for each in own.transports],
                )
                await _until_stopped(settings, bus, runner, listener, engine, stop, store_lost)
    finally:
        await hand_over.close()
        await bus.close()


async def _until_stopped(
    settings: EncoderSettings,
    bus: AsyncBus,
    runner: JobRunner,
    listener: ReplyListener,
    engine: Encoder,
    stop: StopSignal,
    store_lost: asyncio.Event,
) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(listener.run()), group.create_task(_watch_health(engine, store_lost))]
            await _take_jobs(settings, bus, runner, stop)
            for other in others:
                other.cancel()
    except* TriptychError as failures:
        raise failures.exceptions[0] from None


async def _watch_health(engine: Encoder, store_lost: asyncio.Event) -> None:
    """Until cancelled.

    Raises:
        TriptychError: the engine died, also while idle, or the store went away.
    """
    while not store_lost.is_set():
        await engine.check_health()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(store_lost.wait(), HEALTH_CHECK_S)
    raise StoreUnavailableError("the cache store went away")


async def _take_jobs(settings: EncoderSettings, bus: AsyncBus, runner: JobRunner, stop: StopSignal) -> None:
    """Take a job whenever a slot is free; on `stop` take no more, and finish those in hand in bounded time.

    What is not finished is handed back: another encoder has it at once.
    """
    consumer = bus.consumer(
        settings.names.encode_jobs,
        group=ENCODERS_GROUP,
        consumer=settings.instance,
        prefetch=settings.num_slots,
        min_idle_ms=settings.takeover_idle_ms,
        max_deliveries=settings.max_deliveries,
        on_dead_letter=runner.give_up,
    )
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as limit, consumer, asyncio.TaskGroup() as group:

            async def end_on_stop() -> None:
                await stop.wait()
                consumer.stop()
                limit.reschedule(loop.time() + settings.drain_timeout_s)

            group.create_task(end_on_stop())
            async for delivery in consumer:
                group.create_task(runner.run(delivery))
    except TimeoutError:
        log.warning("jobs in hand were not finished in time, and were handed back")
