"""vLLM general plugin: loaded by vLLM in each of its processes, before any other code of Triptych.

It changes vLLM in six places, each because no option exists for it:
1. vLLM's tracer: its spans go where Triptych's go (`_use_triptych_tracing`).
2. the worker's message queue, whose readers spin for a second after each message (`_stop_spinning`).
3. EngineCore's loop: the parking scheduler learns how to wake it (`_let_scheduler_wake_engine`).
4. EngineCore's methods that hosts may call: the worker probes the slab on its GPU (`_let_host_probe_slab`).
5. EngineCore's threads that compile grammars: slow ones have a thread apart (`_compile_slow_grammars_apart`).
6. the resampling of sounds, where there is no torchaudio (`_resample_without_torchaudio`).
Without Triptych's connector in the configuration none of the first five changes what a user sees.
"""

import functools
import time
from typing import Any

from triptych_vllm_connector.seams.current import seam
from triptych_vllm_connector.seams.replacing import is_wrapped, replace, require_names

# vLLM's readers spin for 1 s after each message: EngineCore while its worker computes, on cores that the
# worker could use. A notification wakes a reader at once, but is lost when it comes within about 1.5 ms of
# the one before. So a reader spins for an instant, sleeps, and for a few milliseconds looks by itself too.
# A wake-up lost later is rare, and found soon (vLLM's own 5 s would delay the answer).
SPIN_S = 0.0002
UNCERTAIN_S = 0.005
UNCERTAIN_RECHECK_MS = 1
RECHECK_MS = 50


def register() -> None:
    """Entry point of `vllm.general_plugins`."""
    _use_triptych_tracing()
    _stop_spinning()
    _let_scheduler_wake_engine()
    _let_host_probe_slab()
    _compile_slow_grammars_apart()
    _resample_without_torchaudio()


def _use_triptych_tracing() -> None:
    """Replace vLLM's tracer set-up: vLLM would make a second provider, and a process can have only one."""
    from opentelemetry import trace
    from vllm import tracing

    backends = tracing._REGISTERED_TRACING_BACKENDS
    require_names((tracing.init_tracer, tracing.maybe_init_worker_tracer), "_REGISTERED_TRACING_BACKENDS")
    is_available, _, _, instrument, instrument_manual = backends["otel"]

    def init_tracer(name: str, endpoint: str, extra_attributes: dict[str, str] | None = None) -> Any:
        return trace.get_tracer(name)

    def init_worker_tracer(name: str, process_kind: str, process_name: str) -> Any:
        return trace.get_tracer(name)

    backends["otel"] = (is_available, init_tracer, init_worker_tracer, instrument, instrument_manual)


def _stop_spinning() -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    condition = shm_broadcast.SpinCondition
    original_init, original_wait = condition.__init__, condition.wait
    if is_wrapped(original_wait):
        return
    require_names((original_init,), "busy_loop_s")
    require_names((original_wait,), "busy_loop_s", "last_read")
    require_names((shm_broadcast.MessageQueue.create_from_handle,), "SpinCondition")

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        if self.is_reader:
            self.busy_loop_s = SPIN_S

    @functools.wraps(original_wait)
    def wait(self: Any, timeout_ms: int | None = None) -> None:
        is_uncertain = time.monotonic() < self.last_read + UNCERTAIN_S
        recheck_ms = UNCERTAIN_RECHECK_MS if is_uncertain else RECHECK_MS
        original_wait(self, recheck_ms if timeout_ms is None else min(timeout_ms, recheck_ms))

    condition.__init__ = init
    replace(condition, "wait", wait, used_by=(seam.message_reader(),))


def _let_scheduler_wake_engine() -> None:
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    def wrap_loop(cls: Any) -> None:
        original = cls.__dict__.get("run_busy_loop")
        if original is None or is_wrapped(original):
            return
        require_names((cls._process_input_queue,), "input_queue", "_handle_client_request")

        @functools.wraps(original)
        def run_busy_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
            attach = getattr(self.scheduler, "attach_waker", None)
            if attach is not None:
                attach(lambda: self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)))
            return original(self, *args, **kwargs)

        replace(cls, "run_busy_loop", run_busy_loop, used_by=(EngineCoreProc.run_engine_core,))

    wrap_loop(EngineCoreProc)
    wrap_loop(DPEngineCoreProc)


def _let_host_probe_slab() -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    from triptych_vllm_connector.slab_probe import probe_in_engine

    require_names((EngineCoreProc._handle_client_request,), "getattr")  # utilities are found by name
    EngineCore.triptych_probe_slab = probe_in_engine


def _compile_slow_grammars_apart() -> None:
    from triptych_vllm_connector.grammars.compiled import use_slow_lane
    from triptych_vllm_connector.grammars.token_cost import bound_token_cost

    use_slow_lane()
    bound_token_cost()


def _resample_without_torchaudio() -> None:
    """Resample without torchaudio, which vLLM requires and which has no loadable build for torch on CPU."""
    from vllm.multimodal import audio
    from vllm.utils.import_utils import PlaceholderModule

    if isinstance(audio.torchaudio, PlaceholderModule):
        replace(
            audio,
            "resample_audio_torchaudio",
            audio.resample_audio_soxr,
            used_by=(audio.AudioResampler.resample,),
        )
