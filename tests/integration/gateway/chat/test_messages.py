"""Anthropic's Messages API through the gateway, as the anthropic client sees it."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.support.gateway.local_encode import ANSWER, QUICK, tower, without_encoders
from tests.support.gateway.samples import MODEL, data_url, entry, image_bytes, image_part, write_keys
from tests.support.gateway.system import System, opened_system
from tests.support.waiting import until, until_async
from triptych_common.domain.hashing import tenant_salt
from triptych_common.protocol.item_urls import parse_item_url
from triptych_common.protocol.messages import ECTransferParams, FailureKind
from triptych_gateway.endpoints.table import COUNT_TOKENS, MESSAGES

RAW = "data:application/octet-stream;base64,{data}"
WORDS = "word0 word1 word2"
BODY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "a"}],
}


@asynccontextmanager
async def client_of(system: System, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=system.gateway.settings.local_urls[0], api_key=key, max_retries=0, timeout=20
    ) as client:
        yield client


async def ask(client: anthropic.AsyncAnthropic, content: Any, **options: Any) -> Any:
    """One message; its text where it is streamed, to its end."""
    messages: Any = [{"role": "user", "content": content}]
    return await client.messages.create(model=MODEL, max_tokens=5, messages=messages, **options)


async def streamed(client: anthropic.AsyncAnthropic, content: Any, **options: Any) -> Any:
    """The message that the client puts together."""
    messages: Any = [{"role": "user", "content": content}]
    async with client.messages.stream(model=MODEL, max_tokens=5, messages=messages, **options) as stream:
        return await stream.get_final_message()


def image(color: int = 1, size: tuple[int, int] = (8, 8)) -> dict[str, Any]:
    data = base64.b64encode(image_bytes(color, size)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def hash_of(block: dict[str, Any]) -> str:
    """Return the hash of an item that is sent by its URL."""
    assert block.keys() == {"type", "source"}
    assert block["source"].keys() == {"type", "url"}
    named = parse_item_url(block["source"]["url"])
    assert named is not None
    assert named.data_url is None
    return named.item_id


@pytest.fixture
async def claude(system: System) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with client_of(system) as client:
        yield client


# ---- text --------------------------------------------------------------------------------------------
async def test_text_passes_without_the_encode_path(system: System, claude: anthropic.AsyncAnthropic) -> None:
    options: dict[str, Any] = {"system": "s", "stop_sequences": ["x"]}
    answer = await ask(claude, "hello", **options, extra_body={"top_k": 3, "request_id": "theirs"})
    assert (answer.type, answer.role, answer.content[0].text) == ("message", "assistant", WORDS)
    assert answer._request_id.startswith("req-")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (2, 1)
    sent = BODY | {"messages": [{"role": "user", "content": "hello"}], "top_k": 3} | options
    assert system.prefill_decode.bodies == [sent]
    assert system.prefill_decode.paths == ["/v1/messages"]
    assert system.encoder.jobs == []


async def test_text_streamed(system: System, claude: anthropic.AsyncAnthropic) -> None:
    message = await streamed(claude, "hello")
    assert message.content[0].text == WORDS + " "
    assert message.stop_reason == "end_turn"


# ---- images ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
async def test_images_in_their_places(system: System, claude: anthropic.AsyncAnthropic, stream: bool) -> None:
    url = {"type": "image", "source": {"type": "url", "url": data_url(image_bytes(2, (6, 8)))}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("r"), url]}
    content = [text("a"), image(1, (4, 2)), result, image(1, (4, 2))]
    answer = await (streamed if stream else ask)(claude, content)
    assert answer.content[0].text.strip() == f"1x8x6 1x2x4 1x2x4 {WORDS}"
    (body,) = system.prefill_decode.bodies
    first, beside, sent, again = body["messages"][0]["content"]
    assert first == content[0]
    assert beside == again
    assert (sent["tool_use_id"], sent["content"][0]) == ("t", text("r"))
    params = ECTransferParams.model_validate_json(
        httpx.Response(200, json=body["ec_transfer_params"]).content
    )
    in_order = [sent["content"][1], beside, again]
    assert [item.mm_hash for item in params.items] == [hash_of(each) for each in in_order]
    assert [item.num_embeds for item in params.items] == [48, 8, 8]
    assert len(system.encoder.jobs) == 2  # the same picture twice is one job


async def test_an_image_is_the_same_item_as_in_a_chat_completion(
    system: System, claude: anthropic.AsyncAnthropic
) -> None:
    await ask(claude, [image(7)])
    await system.ask([image_part(7)])
    messages, chat = system.prefill_decode.bodies
    part = chat["messages"][0]["content"][0]
    assert part["uuid"] == hash_of(messages["messages"][0]["content"][0])
    assert len(system.encoder.jobs) == 1


@pytest.mark.parametrize("system", [QUICK], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
async def test_without_encoders_the_whole_request_goes_to_a_tower(
    system: System, claude: anthropic.AsyncAnthropic, stream: bool
) -> None:
    instance = await tower(system)
    await without_encoders(system)
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image(3)]}
    answer = await (streamed if stream else ask)(claude, [text("what?"), result])
    assert answer.content[0].text.strip() == ANSWER
    (body,) = system.prefill_decode.bodies + instance.bodies
    assert "ec_transfer_params" not in body
    (sent,) = body["messages"][0]["content"][1]["content"]
    assert sent["source"].keys() == {"type", "url"}
    assert base64.b64decode(sent["source"]["url"].partition("base64,")[2]) == image_bytes(3)


async def test_a_tenants_items_have_names_of_their_own(
    redis_url: str, tmp_path: Path, keys_file: Path
) -> None:
    async with (
        opened_system(redis_url, tmp_path, api_keys_file=keys_file, **QUICK) as system,
        client_of(system, "key-alice") as alice,
        client_of(system, "key-bob") as bob,
    ):
        for client in (alice, bob):
            await ask(client, [image()])
        bodies = system.prefill_decode.bodies
        assert [body["cache_salt"] for body in bodies] == [tenant_salt("red"), tenant_salt("blue")]
        names = [hash_of(body["messages"][0]["content"][0]) for body in bodies]
        assert len(set(names)) == 2
        instance = await tower(system)
        await without_encoders(system)
        for client in (alice, bob):
            await ask(client, [image(2)])
        raw = [
            parse_item_url(body["messages"][0]["content"][0]["source"]["url"])
            for body in bodies[2:] + instance.bodies
        ]
        assert [each.data_url for each in raw if each] == [RAW.format(data=image(2)["source"]["data"])] * 2
        assert len({*names, *(each.item_id for each in raw if each)}) == 4


@pytest.mark.parametrize("key", ["key-alice", "key-bob"])
async def test_uploaded_files(redis_url: str, tmp_path: Path, keys_file: Path, key: str) -> None:
    changes: dict[str, Any] = {"files_dir": tmp_path / "files", "files_encode_ahead": False}
    changes["api_keys_file"] = keys_file
    async with opened_system(redis_url, tmp_path, **changes) as system, client_of(system, key) as client:
        openai_client = system.openai.with_options(api_key="key-alice")
        file = await openai_client.files.create(file=("x.png", image_bytes(5, (4, 2))), purpose="vision")
        content = [{"type": "image", "source": {"type": "file", "file_id": file.id}}]
        if key == "key-alice":
            answer = await ask(client, content)
            assert answer.content[0].text == f"1x2x4 {WORDS}"
        else:
            with pytest.raises(anthropic.NotFoundError):
                await ask(client, content)


# ---- how many tokens ---------------------------------------------------------------------------------
async def test_tokens_of_a_text(system: System, claude: anthropic.AsyncAnthropic) -> None:
    messages: Any = [{"role": "user", "content": "one two three"}]
    counted = await claude.messages.count_tokens(model=MODEL, messages=messages)
    assert counted.input_tokens == 3
    assert system.prefill_decode.paths == [COUNT_TOKENS.path]


async def test_tokens_of_images_are_known_by_their_sizes_alone(
    system: System, claude: anthropic.AsyncAnthropic
) -> None:
    system.encoder.before_seal.clear()  # nothing is encoded
    messages: Any = [{"role": "user", "content": [text("one two"), image(1, (4, 2))]}]
    for _ in range(2):
        counted = await claude.messages.count_tokens(model=MODEL, messages=messages)
        assert counted.input_tokens == 10
    assert len(system.encoder.jobs) == 1
    assert system.encoder.num_encodes == 0
    assert system.prefill_decode.bodies == []
    body = system.prefill_decode.tokenized[0]
    (item,) = body["ec_transfer_params"]["items"]
    assert hash_of(body["messages"][0]["content"][1]) == item["mm_hash"]
    acks = system.bus.names.acks("encoder-0")

    async def is_acked() -> bool:  # for the instance, which has no such request
        return bool(await system.bus.client.xlen(acks) >= 1)

    await until_async(is_acked)


@pytest.mark.parametrize("system", [QUICK], indirect=True)
async def test_tokens_are_counted_by_a_tower_where_no_encoder_is(
    system: System, claude: anthropic.AsyncAnthropic
) -> None:
    instance = await tower(system)
    await without_encoders(system)
    messages: Any = [{"role": "user", "content": [text("one two"), image()]}]
    assert (await claude.messages.count_tokens(model=MODEL, messages=messages)).input_tokens == 2
    (body,) = instance.tokenized
    assert body["messages"][0]["content"][1]["source"]["url"].startswith("data:")


async def test_a_prompt_that_is_too_long_is_refused_before_its_media_are_encoded(
    system: System, claude: anthropic.AsyncAnthropic
) -> None:
    record = system.prefill_decode.record().model_copy(update={"max_model_len": 30})
    await system.stack.enter_async_context(_registered(system, record))
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        await ask(claude, [text("a " * 40), image()], system="one two")
    assert system.encoder.jobs == []
    (counted,) = system.prefill_decode.tokenized
    assert counted["system"] == "one two"
    assert counted["messages"][0]["content"] == [text("a " * 40)]


@asynccontextmanager
async def _registered(system: System, record: Any) -> AsyncIterator[None]:
    look = system.gateway.view._registry.list_instances

    async def list_instances() -> list[Any]:
        return [record if each.instance == record.instance else each for each in await look()]

    async def is_seen() -> bool:
        await system.refresh()
        return record in system.gateway.view.records

    system.gateway.view._registry.list_instances = list_instances  # type: ignore[method-assign]
    await until_async(is_seen)
    await until_async(is_seen)  # a reading that was under way may have come in between
    yield


# ---- keys and limits ---------------------------------------------------------------------------------
@pytest.mark.parametrize("system", [{"api_keys": ("secret",)}], indirect=True)
async def test_a_key_is_taken_by_either_header(system: System) -> None:
    for headers, status in (
        ({"x-api-key": "secret"}, 200),
        ({"Authorization": "Bearer secret"}, 200),
        ({"x-api-key": "secret", "Authorization": "Bearer other"}, 401),
        ({"x-api-key": "other"}, 401),
        ({}, 401),
    ):
        for endpoint in (MESSAGES, COUNT_TOKENS):
            answer = await system.http.post(endpoint.path, json=BODY, headers=headers)
            assert answer.status_code == status, headers
        chat = await system.post({"model": MODEL, "messages": BODY["messages"]}, headers=headers)
        assert chat.status_code == (status if "x-api-key" not in headers or status == 401 else 401)
    async with client_of(system, "secret") as known, client_of(system, "other") as unknown:
        assert (await ask(known, "a")).content[0].text == WORDS
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await ask(unknown, "a")
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "the API key is not valid"},
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answers_tokens_are_charged_to_its_key(redis_url: str, tmp_path: Path, stream: bool) -> None:
    keys = write_keys(tmp_path / "keys.toml", entry("alice", "one", tokens_per_minute=1000))
    async with (
        opened_system(redis_url, tmp_path, api_keys_file=keys) as system,
        client_of(system, "one") as one,
    ):
        await (streamed if stream else ask)(one, "hello " * 100)
        assert system.prefill_decode.bodies[0].keys() - BODY.keys() <= {"stream"}

        async def is_settled() -> bool:
            kept = await system.bus.client.hgetall(system.bus.names.limit_levels("alice"))
            return float(kept[b"tokens"].split()[0]) <= 3  # 2 of the prompt and 1 of the answer

        await until_async(is_settled)
        system.prefill_decode.behaviour = "hang"
        message: Any = {"role": "user", "content": "a"}
        long = asyncio.get_running_loop().create_task(
            one.messages.create(model=MODEL, max_tokens=900, messages=[message])
        )
        await until(lambda: len(system.prefill_decode.bodies) == 2)
        with pytest.raises(anthropic.RateLimitError) as caught:
            await one.messages.create(model=MODEL, max_tokens=900, messages=[message])
        long.cancel()
        assert caught.value.response.headers["retry-after"]


# ---- when parts fail -----------------------------------------------------------------------------
async def test_a_failed_encode_is_the_requests_error(
    system: System, claude: anthropic.AsyncAnthropic
) -> None:
    system.encoder.failures = [FailureKind.BAD_MEDIA]
    with pytest.raises(anthropic.BadRequestError) as caught:
        await ask(claude, [image()])
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert "messages[0].content[0].source.data" in body["error"]["message"]


@pytest.mark.parametrize(
    ("behaviour", "error", "kind"),
    [
        ("refuse", anthropic.BadRequestError, "invalid_request_error"),
        ("too_long", anthropic.BadRequestError, "invalid_request_error"),
        ("fail", anthropic.InternalServerError, "overloaded_error"),
        ("busy", anthropic.InternalServerError, "overloaded_error"),
    ],
)
@pytest.mark.parametrize("content", ["a", [image()]], ids=["text", "image"])
async def test_prefill_decodes_errors_have_anthropics_form(
    system: System,
    claude: anthropic.AsyncAnthropic,
    behaviour: str,
    error: type[anthropic.APIStatusError],
    kind: str,
    content: Any,
) -> None:
    system.prefill_decode.behaviour = behaviour
    with pytest.raises(anthropic.APIStatusError) as caught:
        await ask(claude, content)
    body: Any = caught.value.body
    assert caught.value.status_code == (400 if error is anthropic.BadRequestError else 503)
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["error"].keys() == {"type", "message"}


@pytest.mark.parametrize("behaviour", ["die", "error_late"])
@pytest.mark.parametrize("content", ["a", [image()]], ids=["text", "image"])
async def test_a_stream_that_breaks_off_ends_with_an_error_event(
    system: System, claude: anthropic.AsyncAnthropic, behaviour: str, content: Any
) -> None:
    system.prefill_decode.behaviour = behaviour
    with pytest.raises(anthropic.APIError) as caught:
        await streamed(claude, content)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "overloaded_error")
    raw = await system.http.post("/v1/messages", json=BODY | {"stream": True})
    *events, last = raw.text.strip().split("\n\n")
    assert last.startswith("event: error\ndata: {")
    assert all(event.startswith("event: ") for event in events)
    assert "message_stop" not in raw.text


@pytest.mark.parametrize("content", ["a", [image()]], ids=["text", "image"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_request(
    system: System, claude: anthropic.AsyncAnthropic, content: Any, stream: bool
) -> None:
    system.prefill_decode.behaviour = "hang"
    asked = asyncio.get_running_loop().create_task((streamed if stream else ask)(claude, content))
    await until(lambda: len(system.prefill_decode.bodies) == 1)
    asked.cancel()
    await until(lambda: system.prefill_decode.num_disconnects == 1)
