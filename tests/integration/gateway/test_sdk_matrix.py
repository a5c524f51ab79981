"""OpenAI's own client against the gateway: synchronous and not, streams, files, images, and its errors.

A stand-in answers instead of an engine; the essential part on real ones is in tests/engine/test_endpoints.py.
Other clients of OpenAI's API are in test_sdk_others.py.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, DefaultHttpxClient, OpenAI

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.key_samples import entry, write_keys
from tests.support.gateway.media_samples import data_url, image_bytes
from tests.support.gateway.serving import MODEL
from tests.support.gateway.system import System, opened_system

ASKED: list[Any] = [{"role": "user", "content": "x"}]
PICTURE = image_bytes(7)
WORDS = "word0 word1 word2"


@pytest.fixture
async def keyed(redis_url: str, tmp_path: Path) -> AsyncIterator[System]:
    """With files, and a key of one request a minute beside one without limits."""
    keys = write_keys(
        tmp_path / "keys.toml", entry("any", "key"), entry("once", "slow", requests_per_minute=1)
    )
    fake = FakePrefillDecode(pools=True)
    async with opened_system(
        redis_url, tmp_path, fake, api_keys_file=keys, files_dir=tmp_path / "files", max_body_bytes=100_000
    ) as system:
        yield system


def synchronous(system: System, key: str = "key") -> OpenAI:
    return OpenAI(
        base_url=str(system.openai.base_url),
        api_key=key,
        max_retries=0,
        timeout=20,
        http_client=DefaultHttpxClient(trust_env=False),
    )


def asynchronous(system: System, key: str = "key") -> AsyncOpenAI:
    return system.openai.with_options(api_key=key)


def image_content(url: str) -> list[Any]:
    return [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}]


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
    await keyed.assert_idle()


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
    await keyed.assert_idle()


async def test_a_stream_that_its_reader_leaves_is_aborted(keyed: System) -> None:
    keyed.prefill_decode.behaviour = "stall"
    stream = await asynchronous(keyed).chat.completions.create(model=MODEL, messages=ASKED, stream=True)
    async for _ in stream:
        break
    await stream.close()
    keyed.prefill_decode.release.set()
    await keyed.assert_idle()


async def test_images_and_files(keyed: System) -> None:
    """The same picture as a data URL and as an uploaded file, whose pages, bytes and end the client reads."""
    client = asynchronous(keyed)
    contents: list[list[Any]] = [image_content(data_url(PICTURE))]
    made = await client.files.create(file=("p.png", PICTURE, "image/png"), purpose="vision")
    assert (made.object, made.purpose, made.bytes) == ("file", "vision", len(PICTURE))
    contents.append([{"type": "text", "text": "x"}, {"type": "file", "file": {"file_id": made.id}}])
    answers = [
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": each}])
        for each in contents
    ]
    texts = {answer.choices[0].message.content for answer in answers}
    assert len(texts) == 1
    assert texts != {WORDS}, "the stand-in shows the item's grid"
    assert [each.id async for each in client.files.list(limit=1)] == [made.id]
    assert (await client.files.retrieve(made.id)).filename == "p.png"
    assert (await client.files.content(made.id)).content == PICTURE
    assert (await client.files.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made.id)
    await keyed.assert_idle()


async def refusal(asked: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await asked
    error = caught.value
    assert error.request_id or error.status_code in (401, 404), "to be found in the log"
    assert isinstance(error.body, dict)
    assert set(error.body) == {"message", "type", "param", "code"}
    return error


async def test_its_classes_of_errors(keyed: System) -> None:
    client, create = asynchronous(keyed), asynchronous(keyed).chat.completions.create
    found: dict[str, openai.APIStatusError] = {
        "invalid_type": await refusal(create(model=MODEL, messages="x")),  # type: ignore[arg-type]
        "missing_api_key": await refusal(
            asynchronous(keyed, "none").chat.completions.create(model=MODEL, messages=ASKED)
        ),
        "model_not_found": await refusal(create(model="other", messages=ASKED)),
        "body_too_large": await refusal(create(model=MODEL, messages=ASKED, user="x" * 100_000)),
        "file_not_found": await refusal(client.files.retrieve("file-" + "0" * 32)),
    }
    classes = {name: type(error) for name, error in found.items()}
    assert classes == {
        "invalid_type": openai.BadRequestError,
        "missing_api_key": openai.AuthenticationError,
        "model_not_found": openai.NotFoundError,
        "body_too_large": openai.APIStatusError,  # 413 has none of its own
        "file_not_found": openai.NotFoundError,
    }
    once = asynchronous(keyed, "slow").chat.completions
    await once.create(model=MODEL, messages=ASKED)
    limited = await refusal(once.create(model=MODEL, messages=ASKED))
    assert (type(limited), limited.code) == (openai.RateLimitError, "rate_limit_exceeded")
    assert int(limited.response.headers["retry-after"]) > 0
    for behaviour, code in (("fail", "generation_failed"), ("refuse", "invalid_request")):
        keyed.prefill_decode.behaviour = behaviour
        error = await refusal(create(model=MODEL, messages=ASKED))
        wanted = openai.InternalServerError if behaviour == "fail" else openai.BadRequestError
        assert (type(error), error.code) == (wanted, code)
    keyed.prefill_decode.behaviour = "error_late"
    stream = await create(model=MODEL, messages=ASKED, stream=True)
    with pytest.raises(openai.APIError) as caught:
        [chunk async for chunk in stream]
    assert caught.value.code == "stream_interrupted"
    await keyed.assert_idle()


async def test_it_tries_again_what_may_succeed(keyed: System) -> None:
    """By `Retry-After` and status alone: nothing of ours is needed."""
    keyed.prefill_decode.behaviour = "fail"
    client = asynchronous(keyed).with_options(max_retries=1)
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model=MODEL, messages=ASKED)
    assert len(keyed.prefill_decode.bodies) == 2
    await keyed.assert_idle()
