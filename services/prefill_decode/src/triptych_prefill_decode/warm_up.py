"""Warm-up: the first steps of an engine are slow, so work that no caller waits for takes them.

A model that generates generates a few tokens, one that pools pools a text. What is set up with the first step
(kernels, buffers, the client's reading of outputs) is then there when the instance registers. It also shows
that the engine can do its work at all.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from triptych_common.domain.errors import TriptychError
from triptych_common.runtime import StopSignal
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

NUM_PROMPT_TOKENS = 256  # at most; one step takes them
NUM_OUTPUT_TOKENS = 4
_TEXT = "The quick brown fox jumps over the lazy dog."
_FAILED = frozenset({"error", "abort"})


class WarmUpError(TriptychError):
    """vLLM's engine has started, and cannot do its work: this process must be restarted."""


class WarmUpWork(Protocol):
    """The engine's `generate` or `encode`, with parameters."""

    def __call__(self, *, prompt: Any, request_id: str) -> AsyncIterator[Any]:
        """A request's outputs (`RequestOutput`, `PoolingRequestOutput`).

        It is aborted when the iteration is cancelled.
        """
        ...


class WorkingEngine(Protocol):
    """vLLM's `AsyncLLM`, as far as it is used here."""

    vllm_config: Any
    logger_manager: Any  # takes what the engine reports of each step; None: nothing does

    def get_tokenizer(self) -> Any: ...

    async def reset_prefix_cache(self) -> bool: ...


async def warm_up(
    engine: WorkingEngine, work: WarmUpWork | None, stop: StopSignal, step_timeout_s: float
) -> None:
    """Return when the engine has done `work`, or, without that, when `stop` is set.

    Nothing of it stays: neither in vLLM's metrics nor in the prefix cache.

    Args:
        work: for a model that generates, `NUM_OUTPUT_TOKENS` tokens, with one output for each step; None:
            nothing is done.
        step_timeout_s: no step of the engine takes longer.

    Raises:
        WarmUpError: the engine failed, died, or hangs.
    """
    if work is None:
        return
    started_s = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            working = group.create_task(_do(engine, work, step_timeout_s))
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
        log.info("engine is warm", num_prompt_tokens=working.result(), elapsed_s=elapsed_s)


async def _do(engine: WorkingEngine, work: WarmUpWork, step_timeout_s: float) -> int:
    """Return the number of the prompt's tokens.

    Raises:
        WarmUpError: as above.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(step_timeout_s) as limit:
            with _uncounted(engine):
                token_ids = _prompt(engine)
                end: str | None = None
                async for output in work(prompt={"prompt_token_ids": token_ids}, request_id="warm-up"):
                    limit.reschedule(loop.time() + step_timeout_s)
                    end = _end_of(output)
                # False where a block is still held: what stays is evicted as all others are.
                await engine.reset_prefix_cache()
    except TimeoutError as error:
        raise WarmUpError(f"warm-up: vLLM's engine has not answered for {step_timeout_s} s") from error
    except Exception as error:
        raise WarmUpError(f"warm-up: vLLM's engine cannot do its work: {error!r}") from error
    if end is None or end in _FAILED:
        raise WarmUpError(f"warm-up: vLLM's engine ended its work with {end!r}")
    return len(token_ids)


def _end_of(output: Any) -> str | None:
    """Why it ended, if it did. What pools has one output, at its end, and no reason."""
    if not isinstance(output.outputs, list):
        return "pooled"
    reason: str | None = output.outputs[0].finish_reason
    return reason


def _prompt(engine: WorkingEngine) -> list[int]:
    """Tokens of plain text: those that stand for media need media."""
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
    """What the engine reports meanwhile is dropped: these first tokens are slow, and no caller's."""
    manager = engine.logger_manager
    if manager is None:
        yield
        return
    manager.record = _drop  # in front of the class's own; vLLM's client looks it up for each step
    try:
        yield
    finally:
        del manager.record


def _drop(*_: object, **__: object) -> None:
    """In place of `StatLoggerManager.record`."""
