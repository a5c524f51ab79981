"""The encoder's life: engine, then work (`working`) until it is told to stop.

starting -> working --stop--> draining -> deregistered -> inboxes deleted -> engine ended
"""

import asyncio

from triptych_common.bus import check_login
from triptych_common.runtime import StopSignal
from triptych_common.telemetry import setup_logging, setup_tracing
from triptych_encoder.engine.encoding import PreprocessLimits
from triptych_encoder.settings import EncoderSettings
from triptych_encoder.working import work
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.host.engine_options import encoder_options
from triptych_vllm_connector.host.namespace import digest_of_model
from triptych_vllm_connector.host.platform import has_gpu, may_use_slab
from triptych_vllm_connector.process_exit import end_quickly


async def serve(settings: EncoderSettings, stop: StopSignal) -> None:
    """Run until `stop` is set, then finish the jobs in hand within the drain timeout.

    Raises:
        TriptychError: vLLM, the store or Redis cannot be used; the caller exits and is restarted.
    """
    from triptych_encoder.engine.encode_engine import (
        run_engine,  # vLLM: `work` runs without it, on any `Encoder`
    )

    setup_logging("encoder", settings.instance, settings.log_level)
    end_quickly()
    await check_login(settings.redis_url, settings.deployment, client_name=settings.instance)
    digest = await asyncio.to_thread(digest_of_model, settings.model, settings.engine_args)
    config = ConnectorConfig(
        instance=settings.instance,
        deployment=settings.deployment,
        redis_url=settings.redis_url,
        store_socket=settings.store_socket,
        log_level=settings.log_level,
        traces_dir=settings.traces_dir,
        traces_max_bytes=settings.traces_max_bytes,
        otlp_endpoint=settings.otlp_endpoint,
        namespace_digest=digest,
        has_encoder=True,
        transport=settings.transport,
        debug_encode_delay_s=settings.debug_encode_delay_ms / 1000,
    )
    options = encoder_options(config, settings.model, settings.num_slots, has_gpu(), settings.engine_args)
    limits = PreprocessLimits(
        image_formats=settings.image_formats,
        max_image_pixels=settings.max_image_pixels,
        processor_options=settings.request_processor_options,
        image_options=settings.request_image_options,
        timeout_s=settings.preprocess_timeout_s,
        num_pixels=settings.preprocess_pixels,
        stuck_after_s=settings.engine_timeout_s,
    )
    async with run_engine(options, limits) as engine:  # first: vLLM may fork, and nothing of ours runs yet
        tracing = setup_tracing(
            "encoder",
            settings.instance,
            otlp_endpoint=settings.otlp_endpoint,
            traces_dir=settings.traces_dir,
            traces_max_bytes=settings.traces_max_bytes,
        )
        try:
            ask = engine.probe_slab if may_use_slab(settings.engine_args) else None
            await work(settings, digest, engine, stop, ask)
        finally:
            await asyncio.to_thread(tracing.shutdown)
