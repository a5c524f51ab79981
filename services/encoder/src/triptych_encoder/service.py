"""The encoder's life: vLLM's engine, and the service around it that takes jobs until it is stopped.

    engine started -> ready --stop--> draining -> deregistered -> inboxes deleted -> engine ended

A draining encoder is announced as such. Jobs without blocks are handed back, for another encoder to take at
once; the others are finished, and their pins kept until the requesters' final acks, for `drain_timeout_s` at
most.
"""

import asyncio
import contextlib
import gc
import math
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from triptych_common import release
from triptych_common.bus import AsyncBus, Delivery, check_login, drop_idle_consumers
from triptych_common.coordination import Registration, Registry, SingleFlight
from triptych_common.domain.errors import StoreUnavailableError, TriptychError
from triptych_common.domain.media_bounds import AudioBounds
from triptych_common.protocol.messages import MAX_REASON_CHARS, Compute, InstanceRecord, Role
from triptych_common.protocol.names import ENCODERS_GROUP
from triptych_common.runtime import StopSignal
from triptych_common.runtime.scrape_server import ScrapeServer, check_listener
from triptych_common.runtime.service import first_failure
from triptych_common.telemetry import setup_logging, setup_service_tracing
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.encoding import Encoder, EngineFailedError, PreprocessLimits
from triptych_encoder.host_threads import lower_priority, stay_off
from triptych_encoder.jobs.encode_gate import EncodeGate
from triptych_encoder.jobs.gate_policy import LONG_ENCODE_S, GatePolicy
from triptych_encoder.jobs.job_intake import EncoderPeers, JobIntake
from triptych_encoder.jobs.job_leases import JobLeases
from triptych_encoder.jobs.job_runner import JobRunner
from triptych_encoder.jobs.job_telemetry import EncodeSpeed, JobTelemetry
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.jobs.media_source import MediaSource, new_media_client
from triptych_encoder.jobs.reply_reader import ReplyReader
from triptych_encoder.jobs.reporter import Reporter
from triptych_encoder.metrics import EncoderMetrics
from triptych_encoder.preprocessing.cost_budget import CostBudget
from triptych_encoder.settings import EncoderSettings
from triptych_encoder.store.store_client import StoreClient, TransportSelector
from triptych_encoder.store.store_reservations import StoreReservations
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.host.engine_options import encoder_options
from triptych_vllm_connector.host.engine_watchdog import EngineWatchdog, engine_activity
from triptych_vllm_connector.host.namespace import digest_of_model
from triptych_vllm_connector.host.platform import gpus_are_busy, has_gpu, may_use_slab, probe_store
from triptych_vllm_connector.host.slab_watch import ProbeSlab, SlabWatch
from triptych_vllm_connector.process_exit import end_quickly

log = get_logger(__name__)

GPU_ENCODE_BATCH = 4
CPU_ENCODE_BATCH = 8  # of small items, which take no longer than `LONG_ENCODE_S` together
HEALTH_CHECK_S = 1.0  # vLLM reports a dead engine only when asked


async def serve(settings: EncoderSettings, stop: StopSignal) -> None:
    """Start the engine, and run the service until `stop` is set and it has drained.

    Raises:
        TriptychError: vLLM, the store or Redis cannot be used; the caller exits and is restarted.
    """
    setup_logging("encoder", settings.instance, settings.log_level)
    end_quickly()
    from triptych_encoder.engine.encode_engine import run_engine  # vLLM: the service runs on any `Encoder`

    check_listener(settings)
    comes_last = bool(settings.cores) and settings.core_policy == "text_first"
    if comes_last:
        lower_priority()  # before anything is started that is to have it
    await check_login(settings.redis_url, settings.deployment, client_name=settings.instance)
    digest = await asyncio.to_thread(digest_of_model, settings.model, settings.engine_args)
    config = ConnectorConfig.of_service(
        settings,
        namespace_digest=digest,
        has_encoder=True,
        debug_encode_delay_s=settings.debug_encode_delay_ms / 1000,
    )
    options = encoder_options(config, settings.model, encode_batch(settings), has_gpu(), settings.engine_args)
    limits = PreprocessLimits(
        image_formats=settings.image_formats,
        max_image_pixels=settings.max_image_pixels,
        processor_options=settings.request_processor_options,
        media_options=settings.media_options,
        video=settings.video_bounds,
        audio=AudioBounds(settings.max_audio_s, settings.max_audio_bytes),
        timeout_s=settings.preprocess_timeout_s,
        num_pixels=settings.preprocess_pixels,
        num_threads=settings.preprocess_threads,
        stuck_after_s=settings.engine_timeout_s,
        decoding=settings.decoding_bounds,
    )
    async with run_engine(options, limits) as engine:  # first: nothing of ours runs beside its start
        if comes_last:
            stay_off(set(settings.other_cores) - set(settings.cores))
        tracing = setup_service_tracing("encoder", settings)
        try:
            probe_slab = engine.probe_slab if may_use_slab(settings.engine_args) else None
            compute = await engine.compute()
            async with EncoderService.open(settings, digest, engine, probe_slab, compute) as service:
                await service.run(stop)
        finally:
            await asyncio.to_thread(tracing.shutdown)


class EncoderService:
    """A running engine's service: `open` connects and disconnects, `run` takes jobs, and drains."""

    def __init__(
        self,
        settings: EncoderSettings,
        digest: str,
        engine: Encoder,
        slab: SlabWatch,
        store_client: StoreClient,
        bus: AsyncBus,
        http: httpx.AsyncClient,
        compute: Compute | None,
        metrics: EncoderMetrics,
    ) -> None:
        """`digest` is the engine's namespace digest; everything is connected already.

        `compute` describes the engine's compute resources for the registry.
        """
        instance, names = settings.instance, settings.names
        ledger, registry = Ledger(), Registry(bus)
        reporter = Reporter(bus, names, instance)
        selector = TransportSelector(
            lambda: slab.own, digest, registry, lambda: store_client.slab, store_client.store
        )
        self._settings = settings
        self._digest = digest
        self._engine = engine
        self._slab = slab
        self._store_client = store_client
        self._compute = compute
        self._bus = bus
        self._registry = registry
        self._leases = JobLeases(
            SingleFlight(bus), reporter, ledger, instance, settings.takeover_idle_ms / 1000
        )
        self._speed = EncodeSpeed()
        self._replies = ReplyReader(bus, names, instance, ledger, store_client)
        self._runner = JobRunner(
            engine,
            EngineWatchdog(settings.engine_timeout_s, engine_activity(gpus_are_busy), EngineFailedError),
            EncodeGate(gate_policy(settings), metrics, lambda: self._speed.row_s),
            CostBudget(settings.prepared_pixels),
            MediaSource(http, settings.max_media_bytes),
            store_client,
            StoreReservations(store_client, selector.memories),
            self._leases,
            ledger,
            instance,
            digest,
            JobTelemetry(instance, metrics, self._speed, names.encode_jobs(digest, store_client.store)),
        )
        self._running: dict[asyncio.Task[None], Delivery] = {}
        self._drained_by = float("inf")  # on the event loop's clock
        metrics.num_slots.set(settings.num_slots)
        metrics.num_slots_used.set_function(lambda: len(self._running))

    # ---- startup, shutdown -----------------------------------------------------------------------
    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: EncoderSettings,
        digest: str,
        engine: Encoder,
        probe_slab: ProbeSlab | None = None,
        compute: Compute | None = None,
    ) -> "AsyncIterator[EncoderService]":
        """Open the service; `probe_slab` probes the store's memory on the worker's GPU (None: no GPU).

        Raises:
            TriptychError: the store or Redis cannot be used, or metrics not be served.
        """
        metrics = EncoderMetrics()
        socket, instance = settings.store_socket, settings.instance
        async with contextlib.AsyncExitStack() as stack:
            scrapes = ScrapeServer(metrics.metrics.render)
            stack.push_async_callback(scrapes.close)
            await scrapes.serve(settings)
            is_mappable = (await asyncio.to_thread(probe_store, socket, instance)).has_region
            slab = await stack.enter_async_context(
                SlabWatch.open(
                    socket, instance, settings.transport, has_region=is_mappable, probe_slab=probe_slab
                )
            )
            bus = await AsyncBus.connect(settings.redis_url, settings.deployment, client_name=instance)
            stack.push_async_callback(bus.close)
            store_client = await StoreClient.connect(socket, instance, digest)
            stack.push_async_callback(store_client.close)
            http = await stack.enter_async_context(new_media_client())
            yield cls(settings, digest, engine, slab, store_client, bus, http, compute, metrics)

    # ---- main loop -------------------------------------------------------------------------------
    async def run(self, stop: StopSignal) -> None:
        """Register, take jobs until `stop` is set, drain, deregister.

        Raises:
            TriptychError: the engine, the store or Redis cannot be used any more.
        """
        own_stream = self._settings.names.encode_jobs(self._digest, self._store_client.store)
        await drop_idle_consumers(self._bus, own_stream, ENCODERS_GROUP)
        async with self._registry.keep_registered(self._record()) as registration:
            transports = [each.value for each in self._slab.own.transports]
            gc.freeze()  # a collection need not look through vLLM's modules while items wait
            log.info(
                "encoder ready",
                num_slots=self._settings.num_slots,
                encode_batch=encode_batch(self._settings),
                transports=transports,
            )
            try:
                async with asyncio.TaskGroup() as group:
                    upkeep = [
                        group.create_task(stop.watch(*each))
                        for each in (
                            (self._replies.run,),
                            (self._leases.run,),
                            (self._slab.run, registration),
                            (self._speed.run, registration),
                            (self._watch_health,),
                        )
                    ]
                    await stop.watch(self._take_jobs, registration, stop)
                    await self._wait_settled()
                    for task in upkeep:
                        task.cancel()
            except* TriptychError as failures:
                raise first_failure(failures) from None
        await self._registry.clear_inboxes(self._settings.instance)

    def _record(self) -> InstanceRecord:
        settings = self._settings
        return InstanceRecord(
            instance=settings.instance,
            release=release(),
            boot_id=uuid.uuid4().hex,
            role=Role.ENCODE,
            model=settings.model.rstrip("/").rsplit("/", 1)[-1],
            namespace_digest=self._digest,
            dtype=self._engine.dtype,
            item_limits=dict(self._engine.item_limits),
            unserved_modalities={
                modality: reason[:MAX_REASON_CHARS]
                for modality, reason in self._engine.unserved_modalities.items()
            },
            max_item_embeds=self._engine.max_num_tokens,
            store=self._store_client.store,
            host=settings.host_name,
            num_slots=settings.num_slots,
            compute=self._compute,
            **self._slab.fields(),
        )

    async def _take_jobs(self, registration: Registration, stop: StopSignal) -> None:
        """Take a job of the namespace whenever a slot is free, until `stop`; return when all have ended."""
        settings = self._settings
        intake = JobIntake(
            self._bus,
            EncoderPeers(self._digest, self._store_client.store, self._registry),
            settings.instance,
            num_slots=settings.num_slots,
            min_idle_ms=settings.takeover_idle_ms,
            max_deliveries=settings.max_deliveries,
            on_dead_letter=self._runner.on_dead_letter,
        )
        try:
            async with asyncio.timeout(None) as limit, intake, asyncio.TaskGroup() as group:
                group.create_task(self._drain_on_stop(stop, intake, limit, registration))
                async for delivery in intake:
                    if stop.is_set:
                        await delivery.hand_back()
                        continue
                    task = group.create_task(stop.watch(self._runner.run, delivery))
                    self._running[task] = delivery
                    task.add_done_callback(self._running.pop)
        except TimeoutError:
            log.warning("drain timeout: unfinished jobs handed back")

    async def _watch_health(self) -> None:
        """Check the engine and the store until cancelled.

        Raises:
            TriptychError: the engine died, also while idle, or the store went away.
        """
        lost = self._store_client.lost
        while not lost.is_set():
            await self._engine.check_health()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lost.wait(), HEALTH_CHECK_S)
        raise StoreUnavailableError("the cache store went away")

    # ---- drain -----------------------------------------------------------------------------------
    async def _drain_on_stop(
        self, stop: StopSignal, intake: JobIntake, limit: asyncio.Timeout, registration: Registration
    ) -> None:
        """Hand back jobs without blocks on `stop`; `limit` ends what is not finished in time."""
        await stop.wait()
        intake.stop()
        self._drained_by = asyncio.get_running_loop().time() + self._settings.drain_timeout_s
        limit.reschedule(self._drained_by)
        log.info("draining", num_jobs=len(self._running))
        waiting = {task: each for task, each in self._running.items() if not self._runner.has_blocks(each)}
        for task in waiting:
            task.cancel()
        await registration.announce_draining()
        await asyncio.gather(*waiting, return_exceptions=True)
        for delivery in waiting.values():
            await delivery.hand_back()  # its task had not run yet

    async def _wait_settled(self) -> None:
        """Wait for the requesters' final acks, so that no pin ends too early."""
        try:
            async with asyncio.timeout_at(self._drained_by):
                await self._replies.wait_settled()
        except TimeoutError:
            log.warning("drain timeout: final acks are missing, pins end with the session")


def encode_batch(settings: EncoderSettings) -> int:
    """Number of items that vLLM encodes at once."""
    return settings.encode_batch or (GPU_ENCODE_BATCH if has_gpu() else CPU_ENCODE_BATCH)


def gate_policy(settings: EncoderSettings) -> GatePolicy:
    """Make the policy of an encoder's batches: on a CPU, a large item takes as long in a batch as alone."""
    return GatePolicy(encode_batch(settings), math.inf if has_gpu() else LONG_ENCODE_S)
