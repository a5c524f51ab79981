"""What is forwarded to `/v1/responses` becomes a chat with its items where vLLM reads them; also later."""

from typing import Any

import pytest

from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.item_urls import item_url

pytest.importorskip("vllm")
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages

FIRST, SECOND = (item_url(MmHash(name * 64)) for name in "ab")


def image(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def request_of(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": "m", "request_id": "resp_1", **fields})


def chat_of(request: ResponsesRequest, previous: Any = None) -> list[Any]:
    return construct_input_messages(
        request_instructions=request.instructions, request_input=request.input, prev_msg=previous
    )


def urls_of(messages: list[Any]) -> list[str]:
    """Of images, in the order of the prompt."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image_url"] for part in parts if part["type"] == "input_image"]


def test_images_of_messages_and_of_tools() -> None:
    request = request_of(
        instructions="read",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, image(FIRST)]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [image(SECOND)]},
            {"type": "message", "role": "developer", "content": [image(FIRST)]},
        ],
    )
    messages = chat_of(request)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "developer"]
    assert urls_of(messages) == [FIRST, SECOND, FIRST]


def test_items_travel_with_the_request_and_with_its_sampling() -> None:
    request = request_of(input="a", ec_transfer_params={"items": []})
    assert request.ec_transfer_params == {"items": []}
    request.ec_transfer_params = {"items": [1]}
    extra_args = request.to_sampling_params(8).extra_args
    assert extra_args is not None
    assert extra_args["ec_transfer_params"] == {"items": [1]}


def test_what_a_later_request_goes_on_from() -> None:
    """System messages stay behind with their images: `ResponseRequest.is_kept`."""
    before = chat_of(
        request_of(
            instructions="read",
            input=[
                {"role": "system", "content": [image(SECOND)]},
                {"role": "user", "content": [image(FIRST)]},
            ],
        )
    )
    assert urls_of(chat_of(request_of(input=[{"role": "user", "content": [image(SECOND)]}]), before)) == [
        FIRST,
        SECOND,
    ]


def test_an_image_in_an_answer_is_not_read() -> None:
    """The gateway refuses it: prefill_decode would wait for an item that the prompt does not have."""
    content = [{"type": "input_text", "text": "a"}, image(FIRST)]
    assert urls_of(chat_of(request_of(input=[{"role": "assistant", "content": content}]))) == []
