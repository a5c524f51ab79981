"""The two model runner wrappers: mixins in front of vLLM's own runner class.

Encode, gather and free are calls of the runner to itself, so an object around it would never see them.
`wrap` makes a class of mixin and runner class and gives it to the runner that exists; its state, the
encoder cache's dict above all, stays as it is.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from triptych_common.cores.sharing import Work
from triptych_common.domain.errors import TriptychError
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.pieces import place_items_whole
from triptych_vllm_connector.seams.replacing import replace, require_names
from triptych_vllm_connector.step_metadata import StepOrders
from triptych_vllm_connector.worker.containment import divided, encode_contained
from triptych_vllm_connector.worker.cores.compute_share import ComputeShare
from triptych_vllm_connector.worker.ports import connector_of_worker

log = get_logger(__name__)

_MODELS = "vllm.model_executor.models."
DEEPSTACK_MODULES = {
    _MODELS + "qwen3_vl": "Qwen3VLForConditionalGeneration",
    _MODELS + "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    _MODELS + "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""Modules, each with the class that looks for a missing tower."""
Runner = TypeVar("Runner")

PREFILL_TOKENS = 32  # a step with so many tokens of one request is worth more threads


class _NoLayer:
    """Class without instances, in place of vLLM's `StageMissingLayer`."""


def keep_deepstack(model_config: Any) -> None:
    """Make vLLM keep DeepStack's inputs where the vision tower is not loaded; called before the build.

    Towers of these models feed the first layers of the language model too. Without their tower vLLM makes no
    room for that: Qwen3-VL raises, and Qwen3-Omni answers wrongly. Its models ask whether their tower is a
    `StageMissingLayer`; with this class no tower is.
    """
    get_model_cls(model_config)  # imports its module, and those of the models that it extends
    for name in DEEPSTACK_MODULES:
        if name in sys.modules:
            module = sys.modules[name]
            users = (vars(module)[DEEPSTACK_MODULES[name]].__init__,)
            replace(module, "StageMissingLayer", _NoLayer, used_by=users, everywhere=False)


def _work_of(scheduler_output: Any) -> Work:
    """Kind of work of a prefill_decode step that computes something."""
    if not any(scheduler_output.scheduled_cached_reqs.num_output_tokens):
        return Work.PREFILL
    longest = max(scheduler_output.num_scheduled_tokens.values())
    has_prompt = scheduler_output.scheduled_encoder_inputs or longest >= PREFILL_TOKENS
    return Work.CHUNK if has_prompt else Work.DECODE


@contextlib.contextmanager
def _computing(share: ComputeShare | None, work: Work, *, is_late: bool = False) -> Iterator[None]:
    """Run a step of `work` on the worker's share of cores or of the GPU."""
    if share is None:
        yield
        return
    share.start_step(work, is_late=is_late)
    try:
        yield
    finally:
        share.end_step()


@contextlib.contextmanager
def _sampling_in_vain_without_seed(runner: Any) -> Iterator[None]:
    """Keep the seeds of incomplete prompts from vLLM's sampler on a CPU.

    vLLM's V1 runner samples for such a prompt too and drops the token. Then it sets the request's generator
    back by an offset, which a CPU's generators do not have: without this, a seed would end the engine.
    """
    if runner.device.type != "cpu" or is_v2(runner):
        yield
        return
    batch = runner.input_batch
    is_dropped = runner.discard_request_mask.np[: batch.num_reqs]
    dropped = [index for index in batch.generators if index < batch.num_reqs and is_dropped[index]]
    held = {index: batch.generators.pop(index) for index in dropped}
    try:
        yield
    finally:
        batch.generators.update(held)


class EncoderNotAllowedError(TriptychError):
    """A step planned an encode on an instance that must not encode."""


_Runner: Any = object  # `wrap` puts the wrappers in front of vLLM's class, which has these attributes


class DisaggEncodeGPURunnerWrapper(_Runner):
    """Encoder's runner: times each item's encode, write and seal, and contains faults.

    An item that raises inside the tower is refused, and the engine goes on (`containment`). vLLM's two
    generations of runners encode in different places, `_execute_mm_encoder` and a method of `model_state`;
    `execute_model` is the entry of both. The name says GPU because vLLM's own runner class does, on every
    platform.
    """

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.scheduled_encoder_inputs:
            connector = connector_of_worker()
            with _computing(connector.share, Work.ENCODE):
                if connector.writer is not None:
                    connector.writer.on_encode_start(connector.share.range if connector.share else None)
                if connector.config.debug_encode_delay_s > 0:
                    time.sleep(connector.config.debug_encode_delay_s)  # noqa: TID251 -- the test option's purpose
                return super().execute_model(scheduler_output, *args, **kwargs)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _execute_mm_encoder(self, scheduler_output: Any) -> list[Any]:
        execute = super()._execute_mm_encoder
        self._contain(
            lambda planned: execute(dataclasses.replace(scheduler_output, scheduled_encoder_inputs=planned)),
            scheduler_output.scheduled_encoder_inputs,
            lambda engine_request_id: self.requests[engine_request_id].mm_features,
        )
        return []  # vLLM does not read it: the outputs are in the encoder cache

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        share = connector_of_worker().share
        if share is not None:
            share.watch_layers(self.model)
        if not is_v2(self):
            return
        from vllm.v1.worker.mm_encoder_model_runner import MMEncoderModelRunner

        model_state = self.model_state
        execute, features = model_state.execute_mm_encoder, self.encoder_cache.mm_features
        replace(
            model_state,
            "execute_mm_encoder",
            lambda planned: self._contain(execute, planned, features.__getitem__),
            used_by=(MMEncoderModelRunner.execute_model,),
        )

    def _contain(
        self,
        encode: Callable[[dict[str, list[int]]], Any],
        planned: Mapping[str, list[int]],
        features_of: Callable[[str], Sequence[Any]],
    ) -> None:
        connector = connector_of_worker()

        def refuse(engine_request_id: str, index: int, error: Exception) -> None:
            mm_hash = features_of(engine_request_id)[index].identifier
            if connector.writer is not None:
                connector.writer.on_item_error(mm_hash, error)

        def is_image(engine_request_id: str, index: int) -> bool:
            return bool(features_of(engine_request_id)[index].modality == "image")

        for together in divided(planned, is_image):
            encode_contained(encode, together, refuse, connector.num_ranks)


class DisaggPrefillDecodeGPURunnerWrapper(_Runner):
    """prefill_decode's runner: refuses to run the encoder, unless the instance has one for fallback.

    Prompts that begin in part may have a seed, on a CPU too. `LoadingWorker` times the injection.
    """

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        keep_deepstack(self.model_config)
        super().load_model(*args, **kwargs)
        place_items_whole(self.get_model())

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        planned = scheduler_output.scheduled_encoder_inputs
        connector = connector_of_worker()
        if planned and not connector.config.has_encoder:
            raise EncoderNotAllowedError(
                f"this instance has no encoder, but a step plans to encode {planned}"
            )
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if connector.share is None or num_tokens == 0:
            return super().execute_model(scheduler_output, *args, **kwargs)
        orders = scheduler_output.ec_connector_metadata
        is_late = isinstance(orders, StepOrders) and orders.is_late
        with _computing(connector.share, _work_of(scheduler_output), is_late=is_late):
            return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        with _sampling_in_vain_without_seed(self):
            return super().sample_tokens(*args, **kwargs)


def is_v2(runner: Any) -> bool:
    """True if the runner is of vLLM's second generation, which has a state for the model."""
    vllms = (each for each in type(runner).__mro__ if each is not DisaggEncodeGPURunnerWrapper)
    return not any("_execute_mm_encoder" in vars(each) for each in vllms)


def wrap(runner: Runner, is_producer: bool) -> Runner:
    """Put the wrapper of the instance's role in front of the runner's class. Idempotent."""
    if not is_v2(runner):
        require_names((GPUModelRunner.execute_model,), "_execute_mm_encoder")
    mixin = DisaggEncodeGPURunnerWrapper if is_producer else DisaggPrefillDecodeGPURunnerWrapper
    cls = type(runner)
    if not issubclass(cls, mixin):
        runner.__class__ = type(f"{mixin.__name__}[{cls.__name__}]", (mixin, cls), {})
        log.info("model runner wrapped", wrapper=mixin.__name__, runner=cls.__name__)
    return runner
