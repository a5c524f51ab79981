"""Warm-up: the first steps of an engine are slow, so it takes them before any caller waits.

A generative model generates a few tokens in each way of sampling that callers can ask for; a pooling model
pools a text. What the first use sets up (kernels, libraries, buffers, the client's reading of outputs) is
then there when the instance registers. It also shows that the engine can do its work at all.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from vllm.exceptions import VLLMClientError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.tasks import POOLING_TASKS
from vllm.v1.engine.async_llm import AsyncLLM

from triptych_common.domain.errors import TriptychError
from triptych_common.runtime import StopSignal
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.host.engine_watchdog import EngineWatchdog
from triptych_vllm_connector.seams.replacing import replace
from triptych_vllm_connector.worker.rpc import KEEP_RANDOM_STATE, RESTORE_RANDOM_STATE

log = get_logger(__name__)

NUM_PROMPT_TOKENS = 256  # of the first work, at most; one step takes them
NUM_OUTPUT_TOKENS = 4
NUM_FURTHER_TOKENS = 16  # in the prompt of each further work, which has two steps: prefill, decode
WAYS_OF_SAMPLING: tuple[dict[str, Any], ...] = (
    {"max_tokens": NUM_OUTPUT_TOKENS},
    {"logprobs": 1, "prompt_logprobs": 1},
    {
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {0: 1.0},
        "bad_words": ["fox"], "allowed_token_ids": [0, 1], "min_tokens": 1,
    },
    {"structured_outputs": StructuredOutputsParams(json_object=True)},
    {"temperature": 1.0, "n": 2, "logprobs": 1},  # two at once: other shapes
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 2, "top_p": 0.5, "min_p": 0.1, "seed": 0},
)  # fmt: skip
"""Fields of `SamplingParams`, each with code, kernels or a library of its own, in the sampler or before it.
"""
_SHORT = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
_TEXT = "The quick brown fox jumps over the lazy dog."
_FAILED = frozenset({"error", "abort"})


class WarmUpError(TriptychError):
    """vLLM's engine has started but cannot do its work: this process must be restarted."""


class WarmUpWork(Protocol):
    """The engine's `generate` or `encode`, with parameters."""

    def __call__(self, *, prompt: Any, request_id: str) -> AsyncIterator[Any]:
        """Outputs of a request (`RequestOutput`, `PoolingRequestOutput`); aborted if the iteration is
        cancelled."""
        ...


class WorkingEngine(Protocol):
    """vLLM's `AsyncLLM`, as far as it is used here."""

    vllm_config: Any
    logger_manager: Any  # takes what the engine reports of each step; None: nothing does

    def get_tokenizer(self) -> Any: ...

    async def reset_prefix_cache(self) -> bool: ...

    async def collective_rpc(self, method: str) -> Any: ...


async def warm_up_works(engine: Any) -> list[WarmUpWork]:
    """Every kind of work that the model of `engine`, vLLM's `AsyncLLM`, can do with a text."""
    tasks = await engine.get_supported_tasks()
    if "generate" in tasks:
        return [
            partial(engine.generate, sampling_params=SamplingParams(**{**_SHORT, **way}))
            for way in WAYS_OF_SAMPLING
        ]
    for task in POOLING_TASKS:
        if task in tasks and task != "plugin":  # a plugin's input has its own form
            return [partial(engine.encode, pooling_params=PoolingParams(task=task))]
    return []


async def warm_up(
    engine: WorkingEngine, works: Sequence[WarmUpWork], stop: StopSignal, watchdog: EngineWatchdog
) -> None:
    """Run `works` one after the other, or return when `stop` is set.

    Nothing of it stays: neither in vLLM's metrics nor in the prefix cache, and random numbers are restored.

    Args:
        works: what may be asked of this engine. With an option of its own it may refuse all but the first.

    Raises:
        WarmUpError: the engine failed or died; or hangs, as `watchdog` finds and reports it.
    """
    if not works:
        return
    started_s = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            working = group.create_task(_do(engine, works, watchdog))
            stopped = group.create_task(stop.wait())
            await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
            working.cancel()
            stopped.cancel()
    except* WarmUpError as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    elapsed_s = round(time.monotonic() - started_s, 3)
    if working.cancelled():
        log.info("warm-up ended: stop requested", elapsed_s=elapsed_s)
    else:
        num_prompt_tokens, refused = working.result()
        log.info("engine is warm", num_prompt_tokens=num_prompt_tokens, refused=refused, elapsed_s=elapsed_s)


async def _do(
    engine: WorkingEngine, works: Sequence[WarmUpWork], watchdog: EngineWatchdog
) -> tuple[int, list[str]]:
    """Run the works; returns the number of the prompt's tokens, and reasons for refused works.

    Raises:
        WarmUpError: as above.
    """
    refused: list[str] = []
    try:
        with _uncounted(engine):
            token_ids = _prompt(engine)
            async with watchdog.waiting():
                await engine.collective_rpc(KEEP_RANDOM_STATE)
            await _do_one(works[0], token_ids, "warm-up-0", watchdog)
            for number, work in enumerate(works[1:], 1):
                try:
                    await _do_one(work, token_ids[:NUM_FURTHER_TOKENS], f"warm-up-{number}", watchdog)
                except VLLMClientError as error:  # an option forbids it: callers are refused too
                    refused.append(str(error))
            async with watchdog.waiting():
                await engine.collective_rpc(RESTORE_RANDOM_STATE)
                # False where a block is still held: what stays is evicted as all others are.
                await engine.reset_prefix_cache()
    except WarmUpError:
        raise
    except Exception as error:
        raise WarmUpError(f"warm-up: vLLM's engine cannot do its work: {error!r}") from error
    return len(token_ids), refused


async def _do_one(work: WarmUpWork, token_ids: list[int], request_id: str, watchdog: EngineWatchdog) -> None:
    """Run one work; raises WarmUpError if the engine does not end it as asked."""
    end: str | None = None
    outputs = work(prompt={"prompt_token_ids": token_ids}, request_id=request_id)
    while True:
        async with watchdog.waiting():
            output = await anext(outputs, None)
        if output is None:
            break
        end = _end_of(output)
    if end is None or end in _FAILED:
        raise WarmUpError(f"warm-up: vLLM's engine ended its work with {end!r}")


def _end_of(output: Any) -> str | None:
    """Finish reason of an output, if it is the last; pooling has one output and no reason."""
    if not isinstance(output.outputs, list):
        return "pooled"
    reason: str | None = output.outputs[0].finish_reason
    return reason


def _prompt(engine: WorkingEngine) -> list[int]:
    """Tokens of plain text: placeholder tokens would need media."""
    config = engine.vllm_config
    num_tokens = min(
        NUM_PROMPT_TOKENS,
        config.scheduler_config.max_num_batched_tokens,
        config.model_config.max_model_len - NUM_OUTPUT_TOKENS,
    )
    sentence = engine.get_tokenizer().encode(_TEXT, add_special_tokens=False) or [0]
    repeated = sentence * (num_tokens // len(sentence) + 1)
    return repeated[: max(1, num_tokens)]


@contextmanager
def _uncounted(engine: WorkingEngine) -> Iterator[None]:
    """Drop the engine's statistics meanwhile: these first tokens are slow, and no caller's."""
    manager = engine.logger_manager
    if manager is None:
        yield
        return
    users = (AsyncLLM._run_output_handler,)  # which looks it up for each step
    replace(manager, "record", _drop, used_by=users)  # in front of the class's own
    try:
        yield
    finally:
        del manager.record


def _drop(*_: object, **__: object) -> None:
    """Replacement of `StatLoggerManager.record`, which does nothing."""
