"""Bodies of responses: where images stand, what is refused, and what of them a later request goes on from."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.gateway.samples import data_url, image_bytes
from triptych_common.domain.errors import RequestError
from triptych_gateway.endpoints.table import CREATE_RESPONSE
from triptych_gateway.request.chat_request import parse_chat_request
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard
from triptych_gateway.responses.exchange import ResponseRequest

IMAGE = {"type": "input_image", "image_url": data_url(image_bytes())}
ANSWER = {"type": "output_text", "text": "t", "annotations": []}
TEXT = {"type": "input_text", "text": "a"}


def parse(**fields: Any) -> ResponseRequest:
    raw = json.dumps({"model": "m", **fields}).encode()
    chat = parse_chat_request(raw, PlaceholderGuard(("<pad>",)), 16, endpoint=CREATE_RESPONSE)
    return ResponseRequest.of_chat(chat, "resp_mine")


def refused(**fields: Any) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as raised:
        parse(**fields)
    return raised.value.code, raised.value.param


def test_a_text() -> None:
    request = parse(input="a", stream=True, previous_response_id="resp_1", request_id="theirs")
    assert (request.media, request.stream, request.stores, request.is_background) == ((), True, True, False)
    assert request.previous_response_id == "resp_1"
    assert request.body["request_id"] == request.response_id == "resp_mine"
    assert not parse(input="a", store=False).stores
    assert not parse(input="a", store=None).stores  # as vLLM takes it


def test_images_stand_in_messages_and_in_what_tools_put_out() -> None:
    items = [
        {"role": "user", "content": [TEXT, IMAGE]},
        {"type": "function_call_output", "call_id": "c", "output": [IMAGE]},
        {"role": "user", "content": "text"},
        {"type": "message", "role": "user", "content": [IMAGE | {"detail": "low"}]},
    ]
    media = parse(input=items).media
    assert [part.place for part in media] == [
        ("input", 0, "content", 1), ("input", 1, "output", 0), ("input", 3, "content", 0),
    ]  # fmt: skip
    assert [part.path for part in media][1] == "input[1].output[0].image_url"
    assert [part.item_index for part in media] == [0, 1, 2]


def test_other_items_pass() -> None:
    items = [
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [TEXT]},
        {"type": "message", "role": "assistant", "content": [ANSWER, {"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": [TEXT]},
        {"role": "assistant", "content": "t"},
    ]
    assert parse(input=items).body["input"] == items


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "x"}, "input[0].type"),
        ({"type": ["message"], "role": "user", "content": "a"}, "input[0].type"),
        ({"role": "tool", "content": "a"}, "input[0].role"),
        ({"role": "user", "content": [ANSWER]}, "input[0].content[0].type"),
        ({"role": "assistant", "content": [ANSWER]}, "input[0].content[0].type"),
        ({"role": "user", "content": ["a"]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": {"a": 1}}]}, "input[0].content[0]"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "input[0].arguments"),
        ({"type": "reasoning", "summary": [{"type": "summary_text"}]}, "input[0].summary[0].text"),
    ],
)
def test_items_of_which_vllm_makes_hundreds_of_errors_are_refused(item: dict[str, Any], param: str) -> None:
    assert refused(input=[item])[1] == param


def test_images_of_system_messages_are_not_kept() -> None:
    request = parse(input=[{"role": "system", "content": [IMAGE]}, {"role": "user", "content": [IMAGE]}])
    assert [request.is_kept(part) for part in request.media] == [False, True]


def test_what_may_not_stand_beside_media() -> None:
    given = [{"role": "user", "content": [IMAGE]}]
    for fields, name in (({"background": True}, "background"), ({"truncation": "auto"}, "truncation")):
        assert refused(input=given, **fields) == ("unsupported", name)
        text = parse(input="a", **fields)
        text.check_beside_media()
        with pytest.raises(RequestError):  # the response that it goes on from has media
            replace(text, media=parse(input=given).media).check_beside_media()
    parse(input=given, truncation="disabled")


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "name": "f", "parameters": {}},
        {"type": "custom", "name": "f"},
        {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "f"}]},
    ],
)
def test_tools_that_callers_run(tool: dict[str, Any]) -> None:
    assert parse(input="a", tools=[tool]).body["tools"] == [tool]


def test_tools_without_a_type() -> None:
    assert refused(input="a", tools=[{"name": "f"}]) == ("unsupported_tool", "tools[0].type")


@pytest.mark.parametrize(
    "kind",
    ["mcp", "web_search", "web_search_preview", "code_interpreter", "file_search", "image_generation",
     "container", "computer_use_preview", "local_shell", "shell", "tool_search", "something_new"],
)  # fmt: skip
def test_tools_that_a_server_would_run(kind: str) -> None:
    assert refused(input="a", tools=[{"type": "function", "name": "f"}, {"type": kind}]) == (
        "unsupported_tool", "tools[1].type",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "<pad>"}, "input"),
        ({"input": "a", "instructions": "a <pad>"}, "instructions"),
        ({"input": [{"role": "user", "content": [TEXT | {"text": "<p"}, TEXT | {"text": "ad>"}]}]},
         "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": '{"a": "\\u003cpad>"}'}]},
         "input[0].arguments.a"),
        ({"input": [{"type": "function_call_output", "output": [TEXT | {"text": "<pad>"}]}]},
         "input[0].output"),
        ({"input": "a", "tools": [{"type": "function", "name": "f", "description": "<pad>"}]},
         "tools[0].description"),
    ],
)  # fmt: skip
def test_placeholders_are_found_wherever_text_is_rendered(fields: dict[str, Any], param: str) -> None:
    code, found = refused(**fields)
    assert code == "placeholder_in_text"
    assert found is not None
    assert found.startswith(param)


def test_what_a_model_of_unknown_placeholders_announces_is_looked_for_later() -> None:
    request = parse(input="a <other>")
    with pytest.raises(RequestError):
        request.check_placeholders(("<other>",))
    request.check_placeholders(("<pad>",))
