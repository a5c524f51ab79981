"""OpenAI's own client against the gateway: synchronous and not, whole, streamed, and raw.

A stand-in answers instead of an engine; the essential part on real ones is in tests/engine/test_endpoints.py.
Other clients of OpenAI's API are in test_sdk_others.py.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, DefaultHttpxClient, OpenAI

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.samples import MODEL, entry, write_keys
from tests.support.gateway.system import System, opened_system

ASKED: list[Any] = [{"role": "user", "content": "x"}]
WORDS = "word0 word1 word2"


@pytest.fixture
async def keyed(redis_url: str, tmp_path: Path) -> AsyncIterator[System]:
    """One key may use it."""
    keys = write_keys(tmp_path / "keys.toml", entry("any", "key"))
    fake = FakePrefillDecode(pools=True)
    async with opened_system(redis_url, tmp_path, fake, api_keys_file=keys) as system:
        yield system


def synchronous(system: System) -> OpenAI:
    return OpenAI(
        base_url=str(system.openai.base_url),
        api_key="key",
        max_retries=0,
        timeout=20,
        http_client=DefaultHttpxClient(trust_env=False),
    )


def asynchronous(system: System) -> AsyncOpenAI:
    return system.openai.with_options(api_key="key")


async def test_synchronous(keyed: System) -> None:
    def use() -> None:
        with synchronous(keyed) as client:
            assert [model.id for model in client.models.list()] == [MODEL]
            assert client.models.retrieve(MODEL).owned_by
            answer = client.chat.completions.create(model=MODEL, messages=ASKED)
            assert answer.choices[0].message.content == WORDS
            assert answer.usage is not None
            stream = client.chat.completions.create(model=MODEL, messages=ASKED, stream=True)
            text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
            assert text.split() == WORDS.split()
            assert client.completions.create(model=MODEL, prompt="x").choices[0].text == WORDS
            events = client.completions.create(model=MODEL, prompt="x", stream=True)
            assert (
                "".join(choice.text for event in events for choice in event.choices).split() == WORDS.split()
            )
            assert client.embeddings.create(model=MODEL, input="x", encoding_format="float").object == "list"
            raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=ASKED)
            assert raw.headers["x-request-id"]
            assert raw.parse().choices
            with client.chat.completions.with_streaming_response.create(model=MODEL, messages=ASKED) as whole:
                assert WORDS in whole.read().decode()
            with client.chat.completions.stream(model=MODEL, messages=ASKED) as helper:
                assert helper.get_final_completion().choices[0].message.content == WORDS + " "

    await asyncio.to_thread(use)


async def test_asynchronous(keyed: System) -> None:
    client = asynchronous(keyed)
    assert [model.id async for model in client.models.list()] == [MODEL]
    answer = await client.chat.completions.create(model=MODEL, messages=ASKED)
    assert answer.choices[0].message.content == WORDS
    options: Any = {"stream_options": {"include_usage": True}}
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=ASKED, stream=True, **options
        )
    ]
    assert chunks[-1].usage is not None
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text.split() == WORDS.split()
    many = await asyncio.gather(
        *(client.chat.completions.create(model=MODEL, messages=ASKED) for _ in range(20))
    )
    assert {each.choices[0].message.content for each in many} == {WORDS}
    async with client.chat.completions.stream(model=MODEL, messages=ASKED) as helper:
        kinds = {event.type async for event in helper}
    assert {"chunk", "content.delta", "content.done"} <= kinds
