"""Before an instance registers its engine works: that leaves nothing, and ends with the signal."""

import asyncio
import warnings
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from triptych_common.runtime import StopSignal

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.exceptions import VLLMValidationError

    from triptych_common.runtime.liveness import Activity
    from triptych_prefill_decode.warm_up import (
        NUM_FURTHER_TOKENS,
        NUM_OUTPUT_TOKENS,
        NUM_PROMPT_TOKENS,
        WAYS_OF_SAMPLING,
        WarmUpError,
        warm_up,
        warm_up_works,
    )
    from triptych_vllm_connector.host.engine_watchdog import EngineWatchdog
    from triptych_vllm_connector.worker.rpc import KEEP_RANDOM_STATE, RESTORE_RANDOM_STATE, WorkerRpc

LONG_S = 60.0
PARAMS = object()


class Tokenizer:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(char) for char in text]


class EmptyTokenizer:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return []


class Recorder:
    """vLLM's `StatLoggerManager`."""

    def __init__(self) -> None:
        self.num_records = 0

    def record(self, **_: object) -> None:
        self.num_records += 1


class Engine:
    """Each of `steps` is what it does for one output: a finish reason, an error, or `HANGS`."""

    HANGS = "hangs"

    def __init__(
        self,
        steps: Sequence[str | Exception | None] = (None, None, None, "length"),
        *,
        max_num_batched_tokens: int = 2048,
        max_model_len: int = 8192,
        tokenizer: Any = None,
    ) -> None:
        self._steps = steps
        self._tokenizer = tokenizer or Tokenizer()
        self.logger_manager: Any = Recorder()
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=max_num_batched_tokens),
            model_config=SimpleNamespace(max_model_len=max_model_len),
        )
        self.prompts: list[list[int]] = []
        self.has_begun = asyncio.Event()
        self.num_aborted = 0
        self.num_resets = 0
        self.calls: list[str] = []  # of methods of the worker, and of EngineCore
        self.engine_core = SimpleNamespace(call_utility_async=self.collective_rpc)

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        assert sampling_params is PARAMS
        assert request_id
        self.prompts.append(prompt["prompt_token_ids"])
        self.has_begun.set()
        try:
            for step in self._steps:
                if isinstance(step, Exception):
                    raise step
                if step == self.HANGS:
                    await asyncio.Event().wait()
                if self.logger_manager is not None:
                    self.logger_manager.record(engine_idx=0)
                yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason=step)])
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise

    async def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return True

    async def collective_rpc(self, method: str) -> None:
        self.calls.append(method)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)


def watchdog(limit_s: float = LONG_S) -> "EngineWatchdog":
    return EngineWatchdog(limit_s, lambda: Activity(0.0, frozenset()), WarmUpError)


async def run(engine: Engine, stop: StopSignal | None = None, step_timeout_s: float = LONG_S) -> None:
    async with asyncio.timeout(10):
        work = partial(engine.generate, sampling_params=PARAMS)
        await warm_up(engine, [work], stop or StopSignal(), watchdog(step_timeout_s))


async def test_the_engine_prefills_and_decodes() -> None:
    engine = Engine()
    await run(engine)
    (prompt,) = engine.prompts
    assert len(prompt) == NUM_PROMPT_TOKENS
    assert len(set(prompt)) > 10
    assert engine.num_aborted == 0


async def test_a_model_that_pools_pools() -> None:
    """vLLM's `PoolingRequestOutput` has one output, and no list."""
    engine = Engine()

    async def encode(prompt: Any, pooling_params: Any, request_id: str) -> AsyncIterator[Any]:
        assert pooling_params is PARAMS
        engine.prompts.append(prompt["prompt_token_ids"])
        yield SimpleNamespace(outputs=SimpleNamespace(data=[1.0]), finished=True)

    await warm_up(engine, [partial(encode, pooling_params=PARAMS)], StopSignal(), watchdog())
    (prompt,) = engine.prompts
    assert len(prompt) == NUM_PROMPT_TOKENS
    assert engine.num_resets == 1


async def test_each_way_of_sampling_is_worked_and_what_vllm_refuses_is_left_out() -> None:
    """`--max-logprobs 0` refuses log probabilities: to every caller, so nothing has to be warm."""
    engine = Engine()
    worked: list[Any] = []

    async def generate(prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        worked.append((request_id, len(prompt["prompt_token_ids"]), sampling_params))
        if sampling_params.prompt_logprobs is not None:
            raise VLLMValidationError("logprobs are more than --max-logprobs")
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="length")])

    engine.generate = generate  # type: ignore[method-assign]
    await warm_up(engine, await warm_up_works(engine), StopSignal(), watchdog())
    assert len({request_id for request_id, _, _ in worked}) == len(WAYS_OF_SAMPLING)
    assert [length for _, length, _ in worked] == [NUM_PROMPT_TOKENS] + [NUM_FURTHER_TOKENS] * (
        len(worked) - 1
    )
    assert {params.max_tokens for _, _, params in worked[1:]} == {2}, "prefill and decode"
    for field in ("logprobs", "prompt_logprobs", "seed", "structured_outputs", "logit_bias", "bad_words"):
        assert any(getattr(params, field) not in (None, []) for _, _, params in worked), field
    assert engine.calls == [KEEP_RANDOM_STATE, RESTORE_RANDOM_STATE]


async def test_a_first_work_that_is_refused_ends_the_start() -> None:
    engine = Engine([VLLMValidationError("no text")])
    with pytest.raises(WarmUpError, match="no text"):
        await run(engine)


def test_random_numbers_are_drawn_again() -> None:
    worker = WorkerRpc()
    worker.device = SimpleNamespace(type="cpu")  # type: ignore[attr-defined]
    worker.triptych_keep_random_state()
    first = torch.rand(3).tolist(), np.random.rand(3).tolist()
    worker.triptych_restore_random_state()
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist()) == first


async def test_nothing_of_it_is_counted_or_kept() -> None:
    engine = Engine()
    await run(engine)
    assert engine.logger_manager.num_records == 0
    assert engine.num_resets == 1
    engine.logger_manager.record(engine_idx=0)
    assert engine.logger_manager.num_records == 1, "afterwards requests are counted"


@pytest.mark.parametrize(
    ("limits", "num_tokens"),
    [
        ({"max_num_batched_tokens": 64}, 64),
        ({"max_model_len": 32}, 32 - NUM_OUTPUT_TOKENS),
        ({"max_model_len": NUM_OUTPUT_TOKENS}, 1),
        ({"tokenizer": EmptyTokenizer()}, NUM_PROMPT_TOKENS),
    ],
)
async def test_the_prompt_is_one_that_the_engine_takes_in_one_step(
    limits: dict[str, Any], num_tokens: int
) -> None:
    engine = Engine(**limits)
    await run(engine)
    (prompt,) = engine.prompts
    assert len(prompt) == num_tokens


@pytest.mark.parametrize("steps", [(Engine.HANGS,), (None, Engine.HANGS)])
async def test_the_signal_ends_it(steps: Sequence[str | None]) -> None:
    engine = Engine(steps)
    stop = StopSignal()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(run(engine, stop))
        await engine.has_begun.wait()
        assert not running.done()
        stop.set("SIGTERM")
    assert engine.num_aborted == 1, "the engine does not go on with it"
    engine.logger_manager.record(engine_idx=0)
    assert engine.logger_manager.num_records == 1


async def test_a_signal_from_before() -> None:
    """It came while the engine started."""
    stop = StopSignal()
    stop.set("SIGTERM")
    await run(Engine([Engine.HANGS]), stop)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([RuntimeError("no kernel")], "cannot do its work.*no kernel"),
        ([None, RuntimeError("no kernel")], "cannot do its work.*no kernel"),
        ([None, "error"], "ended its work with 'error'"),
        (["abort"], "ended its work with 'abort'"),
        ([], "ended its work with None"),
    ],
)
async def test_an_engine_that_cannot_work(steps: Sequence[str | Exception | None], text: str) -> None:
    engine = Engine(steps)
    with pytest.raises(WarmUpError, match=text):
        await run(engine)
    engine.logger_manager.record(engine_idx=0)
    assert engine.logger_manager.num_records == 1


@pytest.mark.parametrize("steps", [(Engine.HANGS,), (None, None, Engine.HANGS)])
async def test_an_engine_that_hangs(steps: Sequence[str | None]) -> None:
    engine = Engine(steps)
    with pytest.raises(WarmUpError, match=r"has not answered for 0\.05 s"):
        await run(engine, step_timeout_s=0.05)
    assert engine.num_aborted == 1
