"""A request that the engine fails is refused once no worker can write for it. No engine is started."""

import asyncio
import warnings
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.item_records import item_record
from tests.support.vllm_connector.fake_engine import mm_hash
from triptych_encoder.encoding import EncodeRefusedError, EngineFailedError, PreparedItem
from triptych_vllm_connector.step_orders import WriteOrder

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    from triptych_encoder.engine.encode_engine import EncodeEngine
    from triptych_vllm_connector.worker.rpc import WAIT_WRITTEN

ORDER = WriteOrder(mm_hash("a"), "job-1", 1, 0, 2, 4, "float32")
PREPARED = PreparedItem({}, 2, 3, 4, item_record(2))
LIMIT_S = 10.0


class FakeLLM:
    """`AsyncLLM` whose requests fail with `error`; its worker answers when its step is over."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls: list[Any] = []
        self.asked = asyncio.Event()
        self.step_over = asyncio.Event()
        self.worker_error: Exception | None = None
        self.is_written = True

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        self.calls.append(("generate", request_id))
        raise self.error
        yield

    async def abort(self, request_id: str) -> None:
        self.calls.append(("abort", request_id))

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append(method)
        self.asked.set()
        await self.step_over.wait()
        if self.worker_error is not None:
            raise self.worker_error
        return [self.is_written]


def engine_of(llm: FakeLLM) -> EncodeEngine:
    engine = object.__new__(EncodeEngine)
    engine._llm = llm
    return engine


@pytest.mark.parametrize("error", [EngineGenerateError(), VLLMValidationError("too long"), ValueError()])
async def test_an_item_is_refused_when_the_workers_are_done_with_it(error: Exception) -> None:
    """Its blocks are free from then on: a write that is under way would go into another item's."""
    llm = FakeLLM(error)
    encode = asyncio.create_task(engine_of(llm).encode(PREPARED, ORDER))
    asked = asyncio.create_task(llm.asked.wait())
    async with asyncio.timeout(LIMIT_S):
        await asyncio.wait({encode, asked}, return_when=asyncio.FIRST_COMPLETED)
    assert not encode.done(), "refused while a worker may still write"
    llm.step_over.set()
    with pytest.raises(EncodeRefusedError):
        await encode
    assert llm.calls == [("generate", "job-1"), ("abort", "job-1"), WAIT_WRITTEN], "in this order"
    assert asked.done()


@pytest.mark.parametrize(
    "error", [EngineDeadError(), RuntimeError("Call to triptych_wait_written method failed")]
)
async def test_workers_that_cannot_be_asked_are_a_failed_engine(error: Exception) -> None:
    """Its end frees the blocks: it is unknown whether a worker writes."""
    llm = FakeLLM(EngineGenerateError())
    llm.worker_error = error
    llm.step_over.set()
    with pytest.raises(EngineFailedError):
        await engine_of(llm).encode(PREPARED, ORDER)


async def test_an_item_that_the_gpu_still_writes_is_not_refused() -> None:
    llm = FakeLLM(EngineGenerateError())
    llm.is_written = False
    llm.step_over.set()
    with pytest.raises(EngineFailedError, match="has not written"):
        await engine_of(llm).encode(PREPARED, ORDER)


async def test_an_engine_whose_gpu_writes_says_so() -> None:
    llm = FakeLLM(EngineGenerateError())
    llm.step_over.set()
    assert not await engine_of(llm).is_writing()
    llm.is_written = False
    assert await engine_of(llm).is_writing()
    llm.worker_error = RuntimeError("cudaEventSynchronize: an illegal memory access was encountered")
    with pytest.raises(EngineFailedError, match="illegal memory access"):
        await engine_of(llm).is_writing()
