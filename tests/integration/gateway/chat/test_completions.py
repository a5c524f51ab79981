"""Completions and tokens through the gateway: as the openai client sees them, and when parts fail."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.serving import MODEL
from tests.support.gateway.system import System, opened_system
from tests.support.waiting import until
from triptych_common.domain.hashing import tenant_salt

WORDS = "word0 word1 word2"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "a"}


async def complete(system: System, prompt: Any = "a", **options: Any) -> Any:
    return await system.openai.completions.create(model=MODEL, prompt=prompt, **options)


async def post(system: System, path: str, **body: Any) -> httpx.Response:
    return await system.http.post(path, json=body)


async def test_whole(system: System) -> None:
    options: dict[str, Any] = {"n": 2, "stop": ["x"], "logprobs": 3, "echo": True, "seed": 7, "max_tokens": 5}
    answer = await complete(system, ["a", "b"], **options, extra_body={"top_k": 3, "request_id": "theirs"})
    assert [choice.text for choice in answer.choices] == [WORDS, WORDS]
    assert system.prefill_decode.paths == ["/v1/completions"]
    assert system.prefill_decode.bodies == [{"model": MODEL, "prompt": ["a", "b"], "top_k": 3, **options}]


async def test_streamed(system: System) -> None:
    chunks = [chunk async for chunk in await complete(system, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == WORDS + " "


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_are_untouched(system: System, stream: bool) -> None:
    body = BODY | {"stream": stream}
    through = await post(system, "/v1/completions", **body)
    async with httpx.AsyncClient(trust_env=False) as direct:
        url = f"http://127.0.0.1:{system.prefill_decode.port}/v1/completions"
        expected = await direct.post(url, json=body)
    assert through.content == expected.content
    assert through.headers["content-type"] == expected.headers["content-type"]
    assert through.headers["x-request-id"].startswith("req-")
    assert system.prefill_decode.headers[0]["x-request-id"] == through.headers["x-request-id"]


async def test_tokens(system: System) -> None:
    counted = await post(system, "/tokenize", prompt="one two three")
    assert counted.json()["count"] == 3
    messages = [{"role": "user", "content": [{"type": "text", "text": "one two"}]}]
    assert (await post(system, "/tokenize", model=MODEL, messages=messages)).json()["count"] == 2
    text = await post(system, "/detokenize", model=MODEL, tokens=[3, 4])
    assert text.json() == {"prompt": "token3 token4"}
    assert system.prefill_decode.tokenized[0] == {"prompt": "one two three"}


async def test_batch(system: System) -> None:
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    answer = await post(system, "/v1/chat/completions/batch", model=MODEL, messages=chats)
    assert answer.json()["choices"]
    assert system.prefill_decode.bodies == [{"model": MODEL, "messages": chats}]


async def test_without_a_model_it_is_the_one_that_is_served(system: System) -> None:
    assert (await post(system, "/v1/completions", prompt="a")).json()["choices"]

    class Other(FakePrefillDecode):
        def record(self) -> Any:
            return super().record().model_copy(update={"model": "other"})

    await system.stack.enter_async_context(Other("pd-1").running(system.bus))
    await system.refresh()
    answer = await post(system, "/v1/completions", prompt="a")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "missing_field", "model")


async def test_the_openai_client_understands_refusals(system: System) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await complete(system, "an <|image_pad|>")
    assert (caught.value.code, caught.value.param) == ("placeholder_in_text", "prompt")
    with pytest.raises(openai.BadRequestError) as caught:
        await complete(system, extra_body={"prompt_embeds": "gASVAAAA"})
    assert (caught.value.code, caught.value.param) == ("embeds_not_allowed", "prompt_embeds")
    with pytest.raises(openai.BadRequestError) as caught:
        await complete(system, extra_body={"ec_transfer_params": {"items": []}})
    assert caught.value.code == "field_not_allowed"
    system.prefill_decode.behaviour = "refuse"
    with pytest.raises(openai.BadRequestError) as caught:
        await complete(system, stream=True)
    assert caught.value.param == "max_tokens"
    system.prefill_decode.behaviour = "too_long"
    with pytest.raises(openai.BadRequestError) as caught:
        await complete(system)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_instance_that_cannot_be_reached_costs_only_time(system: System, stream: bool) -> None:
    await system.stack.enter_async_context(FakePrefillDecode("pd-2", port=1).running_nowhere(system.bus))
    await system.refresh()
    for _ in range(4):
        answer = await post(system, "/v1/completions", **BODY, stream=stream)
        assert answer.status_code == 200
        assert (await post(system, "/detokenize", tokens=[1])).status_code == 200


@pytest.mark.parametrize(
    ("behaviour", "stream", "code"),
    [
        ("fail", False, "generation_failed"),
        ("fail", True, "generation_failed"),
        ("error_first", True, "generation_failed"),
    ],
)
async def test_a_failure_before_the_first_token_is_an_http_error(
    system: System, behaviour: str, stream: bool, code: str
) -> None:
    system.prefill_decode.behaviour = behaviour
    answer = await post(system, "/v1/completions", **BODY, stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("behaviour", ["die", "error_late"])
async def test_a_stream_that_breaks_off_ends_with_an_error(system: System, behaviour: str) -> None:
    system.prefill_decode.behaviour = behaviour
    answer = await post(system, "/v1/completions", **BODY, stream=True)
    events = answer.text.strip().split("\n\n")
    assert '"stream_interrupted"' in events[-1]
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize(("behaviour", "stream"), [("hang", False), ("hang", True), ("stall", True)])
async def test_a_client_that_goes_away_leaves_nothing(system: System, behaviour: str, stream: bool) -> None:
    system.prefill_decode.behaviour = behaviour
    read = asyncio.Event()

    async def ask() -> None:
        body = BODY | {"stream": stream}
        async with system.http.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                read.set()

    async with asyncio.TaskGroup() as group:
        reader = group.create_task(ask())
        await until(lambda: system.prefill_decode.bodies)
        if behaviour == "stall":
            await read.wait()
        reader.cancel()
    await system.assert_idle()
    await until(lambda: system.prefill_decode.num_disconnects == 1)


@pytest.fixture
async def tenants(redis_url: str, tmp_path: Path, keys_file: Path) -> AsyncIterator[System]:
    async with opened_system(redis_url, tmp_path, api_keys_file=keys_file) as opened:
        yield opened


async def test_tenants_share_no_prompts(tenants: System) -> None:
    system = tenants
    for key in ("key-alice", "key-bob", "key-carol"):
        client = system.openai.with_options(api_key=key)
        await client.completions.create(model=MODEL, prompt="a")
    salts = [body.get("cache_salt") for body in system.prefill_decode.bodies]
    assert salts == [tenant_salt("red"), tenant_salt("blue"), None]
    await client.completions.create(model=MODEL, prompt="a", extra_body={"cache_salt": tenant_salt("red")})
    assert system.prefill_decode.bodies[-1]["cache_salt"] not in salts
    headers = {"Authorization": "Bearer key-alice"}
    await system.http.post("/tokenize", json={"prompt": "a"}, headers=headers)
    assert "cache_salt" not in system.prefill_decode.tokenized[0]
