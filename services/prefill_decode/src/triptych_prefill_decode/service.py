"""prefill_decode's life: vLLM's engine and its OpenAI server in this process, and its registration.

    engine started -> warm -> serving --stop--> draining -> deregistered -> engine ended -> inbox deleted

A draining instance is announced as such, so that gateways choose others; it refuses new requests, which late
gateways retry elsewhere, and running ones have `drain_timeout_s` to finish.
"""

import asyncio
import contextlib
import os
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.renderers.chat_utils import load_chat_template
from vllm.v1.engine.exceptions import EngineDeadError

from triptych_common import release
from triptych_common.bus import AsyncBus, check_login
from triptych_common.coordination import Registry
from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_common.protocol.urls import base_url
from triptych_common.runtime import StopSignal, bind_tcp
from triptych_common.runtime.drain import AsgiApp, DrainGate
from triptych_common.runtime.service import first_failure
from triptych_common.telemetry import setup_logging, setup_service_tracing
from triptych_common.telemetry.logs import get_logger
from triptych_prefill_decode.engine_health import (
    DeadEngineMiddleware,
    EngineGoneError,
    ServingLoadReader,
    kv_cache_tokens,
    watch_answers,
)
from triptych_prefill_decode.http_server import (
    AdapterTable,
    ListeningServer,
    announce_adapters,
    drain,
    guarded,
)
from triptych_prefill_decode.kv_errors import KvErrorMiddleware, note_failures
from triptych_prefill_decode.request_guards import guard_requests
from triptych_prefill_decode.settings import PrefillDecodeSettings
from triptych_prefill_decode.warm_up import WarmUpError, warm_up, warm_up_works
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.decoding.processes import DecodeProcesses
from triptych_vllm_connector.grammars.checked import compiled_first
from triptych_vllm_connector.host.audio_reader import read_audio_formats_only
from triptych_vllm_connector.host.engine_options import (
    check_division,
    check_engine_options,
    fix_structured_outputs_backend,
    parse_options,
    prefill_decode_options,
)
from triptych_vllm_connector.host.engine_watchdog import EngineWatchdog, engine_activity
from triptych_vllm_connector.host.image_reader import read_image_formats_only
from triptych_vllm_connector.host.kv_transfer import (
    announced_kv_transfer,
    check_kv_transfer,
    free_port,
    is_handing_over,
    kv_environment,
    kv_transfer_config,
    kv_transfer_options,
    side_channel_host,
)
from triptych_vllm_connector.host.model_facts import (
    budget_embeds,
    encoder_cache_embeds,
    item_limits,
    placeholder_tokens,
)
from triptych_vllm_connector.host.namespace import digest_of_model
from triptych_vllm_connector.host.platform import (
    FoundStore,
    gpus_are_busy,
    has_gpu,
    may_use_slab,
    probe_store,
)
from triptych_vllm_connector.host.slab_watch import ProbeSlab, SlabWatch
from triptych_vllm_connector.host.video_reader import read_videos_within
from triptych_vllm_connector.process_exit import end_quickly
from triptych_vllm_connector.records.replaying import replay_records
from triptych_vllm_connector.seams.current import seam
from triptych_vllm_connector.seams.replacing import replace
from triptych_vllm_connector.slab_probe import PROBE_SLAB
from triptych_vllm_connector.worker.rpc import LAYERS_NOT_LOADED, compute_of

log = get_logger(__name__)

HEALTH_CHECK_S = 1.0
ANSWER_CHECK_S = 5.0
CUT_OFF_S = 1  # for answers that are cut off, and for connections to close


async def serve(settings: PrefillDecodeSettings, stop: StopSignal) -> None:
    """Run until `stop` is set, then let running requests end within the drain timeout.

    Raises:
        TriptychError: vLLM, the store or Redis cannot be used; the caller exits and is restarted.
    """
    setup_logging("prefill_decode", settings.instance, settings.log_level)
    end_quickly()
    await check_login(settings.redis_url, settings.deployment, client_name=settings.instance)
    digest = await asyncio.to_thread(digest_of_model, settings.model, settings.engine_args)
    role = settings.announced_role
    config = ConnectorConfig.of_service(
        settings, namespace_digest=digest, has_encoder=settings.has_tower, decodes_only=role is Role.DECODE
    )
    on_gpu = has_gpu()
    kv_config = None
    if is_handing_over(role):
        kv_config = kv_transfer_config(role, settings.kv_lease_s, settings.kv_connector_options, on_gpu)
        _prepare_kv_transfer(settings, on_gpu)
    kv_options = [] if kv_config is None else kv_transfer_options(kv_config, on_gpu)
    options = [
        *prefill_decode_options(config, settings.model, on_gpu, settings.engine_args, kv_options),
        f"--served-model-name={settings.model_name}",
        "--disable-uvicorn-access-log",
    ]
    args = parse_options(options)
    check_engine_options(args)
    fix_structured_outputs_backend(args)
    check_division(args, role)
    if kv_config is not None:
        check_kv_transfer(args.kv_transfer_config, kv_config, role)
    seam.cli_args().validate_parsed_serve_args(args)
    processes = DecodeProcesses(settings.decoding_bounds)
    read_image_formats_only(settings.image_formats, processes)
    read_audio_formats_only(processes)
    read_videos_within(settings.video_bounds, processes)
    guard_requests()
    with contextlib.ExitStack() as held:
        sockets = [
            held.enter_context(contextlib.closing(sock)) for sock in bind_tcp(settings.host, settings.port)
        ]
        # First: nothing of ours runs beside its start.
        async with build_async_engine_client(args) as engine:
            tracing = setup_service_tracing("prefill_decode", settings)
            try:
                async with (
                    compiled_first(
                        engine,
                        timeout_s=settings.grammar_timeout_s,
                        memory_bytes=settings.grammar_memory_bytes,
                    ),
                    PrefillDecodeService.open(settings, config, engine, args, sockets) as service,
                ):
                    if settings.warm_up:
                        works = await warm_up_works(engine)
                        await warm_up(engine, works, stop, _watchdog(settings, WarmUpError))
                    if not stop.is_set:
                        await service.run(stop)
            finally:
                await asyncio.to_thread(tracing.shutdown)
    await _clear_inboxes(settings)  # the engine, which read them, has ended


def _watchdog(settings: PrefillDecodeSettings, error: type[TriptychError]) -> EngineWatchdog:
    activity = engine_activity(gpus_are_busy)
    return EngineWatchdog(settings.engine_timeout_s, activity, error)


def stores_responses(state: Any) -> bool:
    """True if vLLM's application keeps responses (`VLLM_ENABLE_RESPONSES_API_STORE`)."""
    return bool(getattr(getattr(state, "openai_serving_responses", None), "enable_store", False))


def rendering_of(args: Any) -> tuple[object, ...]:
    """Everything in vLLM's parsed options that turns chats into prompts."""
    template = load_chat_template(args.chat_template)
    defaults = sorted(seam.cli_args().resolve_default_chat_template_kwargs(args).items())
    return template, args.chat_template_content_format, defaults


def _prepare_kv_transfer(settings: PrefillDecodeSettings, on_gpu: bool) -> None:
    """Set the environment from which vLLM's connector reads its listening address.

    Each instance has a side channel of its own, on loopback unless another address is announced.
    """
    host = side_channel_host(settings.host, settings.advertised_host or settings.host)
    port = settings.kv_port or free_port(host)
    environment = os.environ  # noqa: TID251 -- vLLM and UCX have no other way
    environment.update(kv_environment(host, port, on_gpu, environment))


async def _reject_handover(engine: Any, request_id: str, params: dict[str, Any]) -> None:
    """Tell the owner of the KV cache that `params` name to free it."""
    with contextlib.suppress(EngineDeadError):  # it is freed when its lease is over
        await engine.notify_kv_transfer_request_rejected(request_id, params)


async def _clear_inboxes(settings: PrefillDecodeSettings) -> None:
    async with AsyncBus(settings.redis_url, settings.deployment, client_name=settings.instance) as bus:
        await Registry(bus).clear_inboxes(settings.instance)


@dataclass(frozen=True)
class PrefillDecodeService:
    """A running engine's service: `open` connects and disconnects, `run` serves, and drains."""

    settings: PrefillDecodeSettings
    engine: Any  # vLLM's client of it
    server: ListeningServer
    gate: DrainGate  # the server's application
    sockets: list[socket.socket]
    slab: SlabWatch
    adapters: AdapterTable
    bus: AsyncBus
    record: InstanceRecord  # announces this instance

    # ---- startup, shutdown -----------------------------------------------------------------------
    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: PrefillDecodeSettings,
        config: ConnectorConfig,
        engine: Any,
        args: Any,
        sockets: list[socket.socket],
    ) -> "AsyncIterator[PrefillDecodeService]":
        """Open the service; `engine` is vLLM's client, `args` are its parsed options.

        Raises:
            TriptychError: the store or Redis cannot be used.
        """
        role = settings.announced_role
        decodes_only = role is Role.DECODE
        kv_transfer = None
        if is_handing_over(role):
            kv_transfer = announced_kv_transfer(
                engine.vllm_config, config.namespace_digest, settings.kv_lease_s, rendering_of(args)
            )
        supported_tasks = await engine.get_supported_tasks()
        app = build_app(args, supported_tasks, engine.model_config)
        await init_app_state(engine, app.state, args, supported_tasks)
        adapters = AdapterTable.of(app.state.openai_serving_models)
        processor = engine.renderer.mm_processor  # None: a model of text alone
        tokens = placeholder_tokens(processor, engine.renderer.tokenizer)
        if processor is not None and "generate" in supported_tasks:
            replay_records(engine, app.state, tokens, renders_media=decodes_only)
        # Again: vLLM's start changes levels, and a library that its application imports sets the root's.
        setup_logging("prefill_decode", settings.instance, settings.log_level)
        answering: AsgiApp = app
        if decodes_only:
            users = (OpenAIServingChat._create_chat_completion,)
            replace(engine, "generate", note_failures(engine.generate), used_by=users)
            answering = KvErrorMiddleware(app, partial(_reject_handover, engine))
        gate = guarded(DeadEngineMiddleware(answering, lambda: engine.errored))
        server = ListeningServer(
            uvicorn.Config(
                gate,
                log_config=None,
                access_log=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=CUT_OFF_S,
                lifespan="on",
            )
        )
        app.state.server = server  # vLLM's handler of engine errors ends it
        cache_embeds = settings.budget_embeds
        if cache_embeds is None and processor is not None:
            cache_embeds = await asyncio.to_thread(encoder_cache_embeds, engine.vllm_config)
        # One that decodes takes no tensors, and needs no store.
        store = FoundStore()
        if not decodes_only:
            store = await asyncio.to_thread(probe_store, settings.store_socket, settings.instance)
        probe_slab: ProbeSlab | None = None
        if not decodes_only and may_use_slab(settings.engine_args):
            probe_slab = partial(engine.engine_core.call_utility_async, PROBE_SLAB)
        async with SlabWatch.open(
            settings.store_socket,
            settings.instance,
            "auto" if decodes_only else settings.transport,
            has_region=store.has_region,
            probe_slab=probe_slab,
        ) as slab:
            record = InstanceRecord(
                instance=settings.instance,
                release=release(),
                boot_id=uuid.uuid4().hex,
                role=role,
                url=base_url(settings.advertised_host or settings.host, sockets[0].getsockname()[1]),
                model=settings.model_name,
                adapters=adapters.names,
                namespace_digest=config.namespace_digest,
                dtype=str(engine.model_config.dtype).removeprefix("torch."),
                item_limits=item_limits(processor) if settings.has_tower and processor is not None else {},
                placeholder_tokens=tokens,
                max_item_embeds=cache_embeds and budget_embeds(config, cache_embeds, engine.model_config),
                max_model_len=engine.model_config.max_model_len,
                num_slots=engine.vllm_config.scheduler_config.max_num_seqs,
                compute=await compute_of(engine),
                stores_responses=stores_responses(app.state),
                kv_transfer=kv_transfer,
                kv_cache_tokens=kv_cache_tokens(engine.vllm_config),
                model_version=settings.model_version,
                store=store.store,
                host=settings.host_name,
                **slab.fields(),
            )
            async with await AsyncBus.connect(
                settings.redis_url, settings.deployment, client_name=settings.instance
            ) as bus:
                yield cls(settings, engine, server, gate, sockets, slab, adapters, bus, record)

    # ---- main loop, drain ------------------------------------------------------------------------
    async def run(self, stop: StopSignal) -> None:
        """Listen, register, serve until `stop` is set, drain, deregister.

        Raises:
            TriptychError: the engine or Redis cannot be used any more.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.server.serve(sockets=self.sockets))
                try:
                    await self.server.listening.wait()  # an instance that is registered takes connections
                    async with Registry(self.bus).keep_registered(
                        self.record, read_fields=ServingLoadReader(self.engine).read_fields
                    ) as registration:
                        log.info(
                            "prefill_decode ready",
                            port=self.sockets[0].getsockname()[1],
                            model=self.settings.model_name,
                            transports=[each.value for each in self.slab.own.transports],
                            layers_not_loaded=(await self.engine.collective_rpc(LAYERS_NOT_LOADED))[0],
                        )
                        upkeep = [
                            group.create_task(stop.watch(*each))
                            for each in (
                                (self._watch_health,),
                                (self._watch_answers,),
                                (self.slab.run, registration),
                                (announce_adapters, self.adapters, registration),
                            )
                        ]
                        await stop.wait()
                        await drain(registration, self.gate, self.settings.drain_timeout_s)
                        for task in upkeep:
                            task.cancel()
                finally:
                    self.server.should_exit = True  # what still runs is cut off
        except* TriptychError as failures:
            raise first_failure(failures) from None

    async def _watch_health(self) -> None:
        """Check the engine and the server until cancelled.

        Raises:
            EngineGoneError: the engine died, or the server ended.
        """
        while not self.server.should_exit:
            await asyncio.sleep(HEALTH_CHECK_S)  # vLLM reports a dead engine only when asked
            try:
                await self.engine.check_health()
            except EngineDeadError as error:
                raise EngineGoneError(f"vLLM's engine died: {error}") from error
        raise EngineGoneError("vLLM's HTTP server ended by itself")

    async def _watch_answers(self) -> None:
        """Check that the engine answers, until cancelled.

        Raises:
            EngineGoneError: the engine hangs, or died.
        """
        try:
            watchdog = _watchdog(self.settings, EngineGoneError)
            await watch_answers(self.engine, watchdog, interval_s=ANSWER_CHECK_S)
        except EngineDeadError as error:
            raise EngineGoneError(f"vLLM's engine died: {error}") from error
