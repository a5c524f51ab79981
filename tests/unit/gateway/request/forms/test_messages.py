"""Bodies of Anthropic's Messages API: where their media are, what is refused, which texts come together."""

from typing import Any

import orjson
import pytest

from triptych_common.domain.errors import RequestError
from triptych_common.domain.media_options import OptionBounds
from triptych_common.protocol.messages import Modality
from triptych_gateway.endpoints.endpoint import Endpoint
from triptych_gateway.endpoints.table import COUNT_TOKENS, MESSAGES
from triptych_gateway.request.chat_request import ChatRequest, RequestOptions, parse_chat_request
from triptych_gateway.request.placeholder_tokens import BILLING_HEADER, PlaceholderGuard
from triptych_gateway.settings import RequestSettings

TOKEN = "<|image_pad|>"
GUARD = PlaceholderGuard((TOKEN,))
OPTIONS = RequestOptions({"max_pixels": OptionBounds(min=4, max=1000)})
FIRST, SECOND = "<|image_", "pad|>"


def parse(content: Any = "a", *, endpoint: Endpoint = MESSAGES, **fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}], **fields}
    limits = RequestSettings(max_messages=10)
    return parse_chat_request(orjson.dumps(body), GUARD, 3, limits, OPTIONS, endpoint=endpoint)


def refusal(content: Any = "a", **fields: Any) -> tuple[int, str, str | None]:
    with pytest.raises(RequestError) as caught:
        parse(content, **fields)
    return caught.value.status_code, caught.value.code, caught.value.param


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(data: str = "AAAA", **source: Any) -> dict[str, Any]:
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data} | source,
        "cache_control": {"type": "ephemeral"},
    }


def result(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": list(content)}


def test_everything_passes_that_is_vllms_to_check() -> None:
    fields = {
        "system": [text("s")], "max_tokens": -1,
        "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"},
        "thinking": {"type": "enabled", "budget_tokens": 5}, "stop_sequences": ["x"], "unknown": {"a": [1]},
        "vllm_xargs": {"mine": 1},
    }  # fmt: skip
    blocks = [
        text("a"),
        {"type": "tool_use", "id": "t", "name": "f", "input": {"image": {"type": "image"}}},
        {"type": "redacted_thinking", "data": "opaque"},
        {"type": "thinking", "thinking": "so", "signature": "s"},
        {"type": "tool_reference", "tool_name": "f"},
        {"type": "tool_result", "tool_use_id": "t", "content": "text"},
        {"type": "tool_result", "tool_use_id": "t", "is_error": True},
        result(text("a"), {"type": "tool_reference", "tool_name": "f"}),
    ]
    request = parse(blocks, **fields, request_id="theirs", stream=True)
    sent = {"model": "m", "messages": [{"role": "user", "content": blocks}], **fields, "stream": True}
    assert request.body == sent
    assert (request.model, request.stream, request.media) == ("m", True, ())
    assert request.endpoint is MESSAGES


def test_counting_is_never_streamed_and_leaves_nothing_in_a_cache() -> None:
    request = parse(endpoint=COUNT_TOKENS, stream=True).of_tenant("salt")
    assert not request.stream
    assert "cache_salt" not in request.body
    assert request.tenant_salt == "salt"
    assert parse().of_tenant("salt").body["cache_salt"] == "salt"


def test_media_are_in_the_order_of_the_prompt() -> None:
    """vLLM puts images of a tool's result before those that stand in the message itself."""
    content = [text("x"), image("AAAA"), result(text("r"), image("BBBB")), image("CCCC")]
    request = parse(content)
    place = ("messages", 0, "content")
    assert [(part.item_index, part.url, part.place, part.path) for part in request.media] == [
        (0, "BBBB", (*place, 2, "content", 1), "messages[0].content[2].content[1].source.data"),
        (1, "AAAA", (*place, 1), "messages[0].content[1].source.data"),
        (2, "CCCC", (*place, 3), "messages[0].content[3].source.data"),
    ]
    assert all(part.is_base64 and part.modality is Modality.IMAGE for part in request.media)
    request.drop_text(request.media[0])
    assert request.body["messages"][0]["content"][2]["content"][1] is None


def test_every_source() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://host/x.png"}}
    file = {"type": "image", "source": {"type": "file", "file_id": "file-1"}}
    untyped = {"type": "image", "source": {"media_type": "image/png", "data": "AAAA"}}
    media = parse([url, file, untyped]).media
    assert [(part.url, part.file_id, part.is_base64) for part in media] == [
        ("https://host/x.png", None, False),
        ("", "file-1", False),
        ("AAAA", None, True),
    ]
    assert [part.path.rpartition(".")[2] for part in media] == ["url", "file_id", "data"]


BLOCK = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        (None, "invalid_type", "messages[0].content"),
        (5, "invalid_type", "messages[0].content"),
        ([5], "invalid_type", BLOCK),
        (["a"], "invalid_type", BLOCK),
        ([{}], "invalid_type", f"{BLOCK}.type"),
        ([{"type": []}], "invalid_type", f"{BLOCK}.type"),
        ([{"type": "text", "text": 5}], "invalid_type", f"{BLOCK}.text"),
        ([{"type": "image_url", "image_url": {"url": "http://x/"}}], "unknown_content_part", f"{BLOCK}.type"),
        ([{"type": "image_embeds", "image_embeds": None}], "unknown_content_part", f"{BLOCK}.type"),
        ([{"type": "document", "source": {}}], "unsupported_content_part", f"{BLOCK}.type"),
        ([{"type": "image"}], "missing_image_url", f"{BLOCK}.source"),
        ([{"type": "image", "source": "x"}], "missing_image_url", f"{BLOCK}.source"),
        ([image(type="content")], "unsupported_content_part", f"{BLOCK}.source.type"),
        ([image(type=[])], "unsupported_content_part", f"{BLOCK}.source.type"),
        ([image(data="")], "missing_image_url", f"{BLOCK}.source.data"),
        ([image(type="url")], "missing_image_url", f"{BLOCK}.source.url"),
        ([image(type="file", file_id=5)], "missing_image_url", f"{BLOCK}.source.file_id"),
        ([result(5)], "invalid_type", f"{BLOCK}.content[0]"),
        ([result({"type": "text", "text": 5})], "invalid_type", f"{BLOCK}.content[0].text"),
        ([result(result())], "unsupported_content_part", f"{BLOCK}.content[0].type"),
        ([result({"type": "search_result"})], "unsupported_content_part", f"{BLOCK}.content[0].type"),
        ([result({"type": "other"})], "unknown_content_part", f"{BLOCK}.content[0].type"),
        ([{"type": "tool_result", "content": 5}], "invalid_type", f"{BLOCK}.content"),
        ([image()] * 2 + [result(image(), image())], "too_many_items", "messages[0].content[1].source.data"),
    ],
)
def test_faulty_content_is_refused_by_name(content: Any, code: str, param: str) -> None:
    assert refusal(content) == (400, code, param)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"model": None}, "invalid_value", "model"),
        ({"model": ""}, "invalid_value", "model"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "unknown_role", "messages[0].role"),
        ({"messages": [{"content": "a"}]}, "missing_field", "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a"}] * 11}, "invalid_value", "messages"),
        ({"system": 5}, "invalid_type", "system"),
        ({"system": [image()]}, "unsupported_content_part", "system[0].type"),
        (
            {"messages": [{"role": "system", "content": [image()]}]},
            "unsupported_content_part",
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [result(image())]}]},
            "unsupported_content_part",
            "messages[0].content[0].content[0].type",
        ),
        ({"ec_transfer_params": {}}, "field_not_allowed", "ec_transfer_params"),
        ({"kv_transfer_params": {}}, "field_not_allowed", "kv_transfer_params"),
        ({"vllm_xargs": {"cache_salt": "x"}}, "field_not_allowed", "vllm_xargs.cache_salt"),
        ({"mm_processor_kwargs": {"max_pixels": 5}}, "field_not_allowed", "mm_processor_kwargs"),
        ({"media_io_kwargs": {"image": {}}}, "field_not_allowed", "media_io_kwargs"),
    ],
)
def test_faulty_fields_are_refused_by_name(fields: dict[str, Any], code: str, param: str) -> None:
    assert refusal(**fields) == (400, code, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"system": TOKEN}, "system"),
        ({"system": [text("a"), text(TOKEN)]}, "system"),
        ({"system": [text(FIRST), text(SECOND)]}, "system"),
        ({"system": [text(FIRST), text(BILLING_HEADER + ": x"), text(SECOND)]}, "system"),
        ({"system": FIRST, "messages": [{"role": "system", "content": SECOND}]}, "system"),
        ({"messages": [{"role": "user", "content": TOKEN}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [result(text(TOKEN))]}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": TOKEN}]}]}, None),
        ({"messages": [{"role": "user", "content": [text(FIRST), text(SECOND)]}]}, "messages[0].content"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [text(FIRST), {"type": "thinking", "thinking": "so"}, text(SECOND)],
                    }
                ]
            },
            "messages[0].content",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": FIRST},
                            text("a"),
                            {"type": "thinking", "thinking": SECOND},
                        ],
                    }
                ]
            },
            "messages[0].content",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {"a": [TOKEN]}}]}]},
            None,
        ),
        ({"tools": [{"name": "f", "description": TOKEN, "input_schema": {}}]}, None),
    ],
)
def test_no_placeholder_comes_from_text(fields: dict[str, Any], param: str | None) -> None:
    status, code, found = refusal(**fields)
    assert (status, code) == (400, "placeholder_in_text")
    assert param is None or (found or "").startswith(param)
    before = parse_chat_request(
        orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}),
        PlaceholderGuard(()),
        3,
        endpoint=MESSAGES,
    )
    with pytest.raises(RequestError, check=lambda error: error.code == "placeholder_in_text"):
        before.check_placeholders([TOKEN])  # an instance's, known later


def test_texts_that_stay_apart_pass() -> None:
    assert parse([{"type": "tool_use", "id": FIRST, "name": SECOND, "input": {}}]).media == ()
    messages = [{"role": "user", "content": FIRST}, {"role": "assistant", "content": SECOND}]
    assert parse(messages=messages).media == ()
