"""prefill_decode's host: what beam search asks the engine for has the parameters of its request."""

import asyncio
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.item_records import item_record
from triptych_common.protocol.messages import ECTransferParams, ItemTransfer, Modality

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.sampling_params import SamplingParams

    from triptych_vllm_connector.records.replaying import _name_items_of_beams, _take_records_from

ITEM = ItemTransfer(
    item_index=0, mm_hash="a" * 64, modality=Modality.IMAGE, num_embeds=3, record=item_record(3)
)
SENT = ECTransferParams(request_id="r", gateway="g", remaining_ms=1, items=(ITEM,))


class Engine:
    """Keeps the parameters of what it is asked to generate."""

    def __init__(self) -> None:
        self.asked: list[SamplingParams] = []

    def generate(self, prompt: Any, sampling_params: SamplingParams, request_id: str) -> None:
        self.asked.append(sampling_params)


@pytest.fixture
def served() -> tuple[Any, Engine]:
    """vLLM's chat endpoint, whose beam search asks in a task for each beam, all with the same parameters."""
    engine, shared = Engine(), SamplingParams(max_tokens=1)

    async def ask(number: int) -> None:
        engine.generate({}, shared, request_id=f"beam-{number}")

    async def create_chat_completion(request: Any) -> None:
        for number in range(2):
            await asyncio.get_running_loop().create_task(ask(number))

    chat = SimpleNamespace(create_chat_completion=create_chat_completion)
    _name_items_of_beams(engine)
    _take_records_from(chat)
    return chat, engine


def request(**fields: Any) -> Any:
    return SimpleNamespace(ec_transfer_params=SENT.model_dump(mode="json"), use_beam_search=True, **fields)


async def test_each_beam_names_the_items(served: tuple[Any, Engine]) -> None:
    chat, engine = served
    await chat.create_chat_completion(request())
    wanted = {"ec_transfer_params": SENT.without_records().model_dump(mode="json")}
    assert [params.extra_args for params in engine.asked] == [wanted, wanted]
    assert all(params.max_tokens == 1 for params in engine.asked)


async def test_other_requests_keep_their_own(served: tuple[Any, Engine]) -> None:
    chat, engine = served
    await chat.create_chat_completion(request())
    plain = request()
    plain.use_beam_search = False
    await chat.create_chat_completion(plain)
    without = request()
    without.ec_transfer_params = None
    await chat.create_chat_completion(without)
    assert [params.extra_args for params in engine.asked[2:]] == [None] * 4
