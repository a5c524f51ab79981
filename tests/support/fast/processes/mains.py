"""What each process runs: the services' own `main`s, and those of the two engines' hosts without vLLM."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import triptych_cache_store.__main__ as cache_store
import triptych_fabric.__main__ as fabric
import triptych_gateway.__main__ as gateway
from tests.support.fast.processes.encode_engine import FastEncodeEngine
from tests.support.fast.processes.points import HANDLED, RECEIVED, SENDING, reach
from tests.support.fast.processes.prefill_decode import FastPrefillDecodeSettings, config_of
from tests.support.fast.processes.prefill_decode import serve as serve_prefill_decode
from tests.support.fast.processes.stages import FastDecodeSettings
from tests.support.fast.processes.stages import serve as serve_decode
from tests.support.fast.processes.tally import note_taken_jobs
from tests.support.fast.processes.tensors import DIGEST
from tests.support.protocol_steps import Party
from triptych_common.runtime import StopSignal, run_service
from triptych_common.telemetry import setup_logging, setup_service_tracing
from triptych_encoder.service import EncoderService
from triptych_encoder.settings import EncoderSettings


def watch_fabric() -> None:
    """Report the steps of this agent's connections; called before the agent starts."""
    from triptych_fabric.wire import connection, frames

    steps = {
        frames.FrameKind.OFFER: "offer",
        frames.FrameKind.ACCEPTED: "accept",
        frames.FrameKind.PRESENT: "accept",
        frames.FrameKind.CHUNK: "bytes",
        frames.FrameKind.STORED: "stored",
    }

    class WatchedSide:
        """A side of a connection."""

        def __init__(self, side: Any) -> None:
            self._side = side

        def __getattr__(self, name: str) -> Any:
            return getattr(self._side, name)

        def next_frame(self, now: float) -> Any:
            head, chunk, pause_s = self._side.next_frame(now)
            if head and (step := steps.get(head[0])) is not None:  # a header begins with its kind
                reach(step, SENDING)
            return head, chunk, pause_s

        def on_frame(self, header: Any, body: bytes) -> None:
            step = steps.get(header.kind)
            if step is not None:
                reach(step, RECEIVED)
            self._side.on_frame(header, body)
            if step is not None:
                reach(step, HANDLED)

    original = connection.FabricConnection.__init__

    def watched_init(self: Any, name: str, channel: Any, side: Any, *rest: Any, **more: Any) -> None:
        original(self, name, channel, cast(Any, WatchedSide(side)), *rest, **more)

    connection.FabricConnection.__init__ = watched_init  # type: ignore[method-assign]


class FastEncoderSettings(EncoderSettings):
    """As the encoder's; and how long an encode takes, how many are made at once, of how many pieces they are,
    and for which namespace.
    """

    encode_s: float = 0.02
    encodes_at_once: int = 64
    num_pieces: int = 1
    tally: Path
    namespace: str = DIGEST


def run_encoder() -> None:
    settings = FastEncoderSettings.load()
    setup_logging("encoder", settings.instance, settings.log_level)
    tracing = setup_service_tracing("encoder", settings)

    note_taken_jobs(settings.tally)

    async def serve(stop: StopSignal) -> None:
        engine = await asyncio.to_thread(
            FastEncodeEngine,
            config_of(settings, settings.namespace),
            settings.encode_s,
            settings.num_pieces,
            settings.tally,
            settings.encodes_at_once,
        )
        try:
            async with EncoderService.open(settings, settings.namespace, engine) as service:
                await service.run(stop)
        finally:
            engine.close()

    try:
        run_service(serve)
    finally:
        tracing.shutdown()


def run_prefill_decode() -> None:
    settings = FastPrefillDecodeSettings.load()
    setup_logging("prefill_decode", settings.instance, settings.log_level)
    tracing = setup_service_tracing("prefill_decode", settings)
    try:
        run_service(lambda stop: serve_prefill_decode(settings, stop))
    finally:
        tracing.shutdown()


def run_decode() -> None:
    settings = FastDecodeSettings.load()
    setup_logging("decode", settings.instance, settings.log_level)
    run_service(lambda stop: serve_decode(settings, stop))


def run_agent() -> None:
    watch_fabric()
    fabric.main()


MAINS: dict[Party, Callable[[], None]] = {
    Party.GATEWAY: gateway.main,
    Party.ENCODER: run_encoder,
    Party.PREFILL_DECODE: run_prefill_decode,
    Party.PREFILL: run_prefill_decode,
    Party.DECODE: run_decode,
    Party.CACHE_STORE: cache_store.main,
    Party.SOURCE_AGENT: run_agent,
}
