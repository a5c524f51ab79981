"""Prompts that are too long for the model are refused before their images are encoded."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.samples import MODEL, image_part, refusal_of
from tests.support.gateway.system import System, opened_system
from tests.support.waiting import until
from triptych_gateway.proxy import upstream
from triptych_gateway.request.prompt_length import CHARS_PER_TOKEN
from triptych_gateway.upstream_client import open_response

MAX_MODEL_LEN = 100


@pytest.fixture
async def limited(redis_url: str, tmp_path: Path) -> AsyncIterator[System]:
    """A prefill_decode that has announced how much it takes."""
    fake = FakePrefillDecode(max_model_len=MAX_MODEL_LEN)
    async with opened_system(redis_url, tmp_path, fake) as system:
        yield system


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": list(parts)}], **fields}


TOO_LONG = (400, "context_length_exceeded", "messages")


async def test_as_soon_as_the_known_rows_are_too_many(limited: System) -> None:
    """Each image alone would fit. The others' jobs have not even begun when the answer is there."""
    fits = await limited.post(chat(image_part(1, (9, 9))))
    assert fits.status_code == 200
    await limited.post(chat(image_part(2, (9, 8))))
    jobs = len(limited.encoder.jobs)
    answer = await limited.post(
        chat(image_part(1, (9, 9)), image_part(2, (9, 8)), image_part(3, (5, 4)), image_part(4, (5, 4)))
    )
    assert refusal_of(answer) == TOO_LONG
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in answer.json()["error"]["message"]
    assert len(limited.encoder.jobs) == jobs


async def test_while_other_items_are_not_sized_yet(limited: System) -> None:
    """The first item's sizes come from the encoder; those of the second never do."""
    limited.encoder.before_metadata.clear()
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(limited.post(chat(image_part(1, (10, 10)), image_part(2, (5, 4)))))
        await until(lambda: len(limited.encoder.jobs) == 2)
        first = next(job for job in limited.encoder.jobs if job.requesters[0].item_index == 0)
        await limited.bus.publish(
            limited.bus.names.encode_results(first.requesters[0].gateway),
            limited.encoder.metadata(first, 10, 10),
        )
        assert refusal_of(await asked) == TOO_LONG
        limited.encoder.before_metadata.set()
    assert limited.prefill_decode.bodies == []


async def test_text_that_may_be_too_long_is_counted(limited: System) -> None:
    words = "word " * MAX_MODEL_LEN
    answer = await limited.post(chat({"type": "text", "text": words}, image_part(1, (5, 4)), "and one more"))
    assert refusal_of(answer) == TOO_LONG
    assert limited.encoder.jobs == []
    (asked,) = limited.prefill_decode.tokenized
    assert asked["messages"] == [
        {
            "role": "user",
            "content": [{"type": "text", "text": words}, {"type": "text", "text": "and one more"}],
        }
    ]


async def test_text_that_is_short_enough_is_served(limited: System) -> None:
    many_bytes = chat({"type": "text", "text": "x" * MAX_MODEL_LEN}, image_part(1, (5, 4)))
    assert (await limited.post(many_bytes)).status_code == 200
    assert len(limited.prefill_decode.tokenized) == 1
    assert (await limited.post(many_bytes)).status_code == 200
    assert len(limited.prefill_decode.tokenized) == 1  # the sizes are known: nothing would be encoded in vain


async def test_rows_and_tokens_count_together(limited: System) -> None:
    await limited.post(chat(image_part(1, (8, 8))))
    text = {"type": "text", "text": "word " * (MAX_MODEL_LEN - 64 + 1)}
    assert (
        refusal_of(await limited.post(chat(image_part(1, (8, 8)), image_part(2, (3, 3)), text))) == TOO_LONG
    )
    assert len(limited.encoder.jobs) == 1


async def test_without_an_answer_the_request_goes_on(limited: System) -> None:
    limited.prefill_decode.can_tokenize = False
    answer = await limited.post(
        chat({"type": "text", "text": "word " * MAX_MODEL_LEN}, image_part(1, (5, 4)))
    )
    assert answer.status_code == 200
    assert len(limited.prefill_decode.tokenized) == 1


# ---- what callers have tokenized ------------------------------------------------------------------
async def test_text_that_no_prompt_could_have_is_not_tokenized(limited: System) -> None:
    body = {"model": MODEL, "prompt": ""}
    empty = len(orjson.dumps(body))
    most = {"prompt": "x" * (CHARS_PER_TOKEN * MAX_MODEL_LEN - empty)}
    for more, status in (("", 200), ("x", 413)):
        content = orjson.dumps(body | {"prompt": most["prompt"] + more})
        answer = await limited.http.post("/tokenize", content=content)
        assert answer.status_code == status
    assert refusal_of(answer) == (413, "prompt_too_large", None)
    assert len(limited.prefill_decode.tokenized) == 1
    tokens = await limited.http.post("/detokenize", json={"tokens": [1] * 40 * MAX_MODEL_LEN})
    assert tokens.status_code == 200, "these are bounded by their number"


async def test_an_instance_tokenizes_one_text_at_a_time(
    limited: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts wait for its thread; those of chats do not wait for their turn here."""
    release, num_running, most = asyncio.Event(), 0, 0
    forward = open_response

    async def slow(client: Any, url: str, *others: Any) -> Any:
        nonlocal num_running, most
        if url.endswith("tokenize"):
            num_running += 1
            most = max(most, num_running)
            await release.wait()
            num_running -= 1
        return await forward(client, url, *others)

    monkeypatch.setattr(upstream, "open_response", slow)
    async with asyncio.TaskGroup() as group:
        bodies = [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})] * 3
        asked = [group.create_task(limited.http.post(path, json=body)) for path, body in bodies]
        await until(
            lambda: limited.gateway.services.access.limiter.num_requests == len(asked) and bool(num_running)
        )
        assert (await limited.ask("a chat")).choices
        release.set()
    assert [task.result().status_code for task in asked] == [200] * len(asked)
    assert most == 1
