"""Responses that are made, by the openai client: texts and images, whole and streamed."""

from typing import Any

import openai
import pytest

from tests.support.gateway.local_encode import QUICK, tower, without_encoders
from tests.support.gateway.samples import MODEL, data_url, image_bytes, image_part
from tests.support.gateway.system import System

IMAGE = {"type": "input_image", "image_url": data_url(image_bytes(7))}
OTHER = {"type": "input_image", "image_url": data_url(image_bytes(9, (4, 6))), "detail": "high"}
TEXT = {"type": "input_text", "text": "what is this?"}
ANSWER = "1x8x8 word0 word1"


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def value_of(system: System, name: str, **labels: str) -> float:
    registry = system.gateway.services.metrics.metrics.registry
    return registry.get_sample_value(f"triptych_gateway_{name}", labels) or 0.0


async def test_a_text(system: System) -> None:
    answer = await system.openai.responses.create(
        model=MODEL, input="hello", instructions="be brief", max_output_tokens=9
    )
    assert answer.output_text == "word0 word1"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 1
    (body,) = system.prefill_decode.bodies
    assert system.prefill_decode.paths == ["/v1/responses"]
    assert body == {
        "model": MODEL, "input": "hello", "instructions": "be brief", "max_output_tokens": 9,
        "request_id": answer.id,
    }  # fmt: skip


async def test_images_go_to_encoders(system: System) -> None:
    answer = await system.openai.responses.create(model=MODEL, input=user(IMAGE, TEXT, OTHER))
    assert answer.output_text == "1x8x8 1x6x4 word0 word1"
    (body,) = system.prefill_decode.bodies
    first, text, second = body["input"][0]["content"]
    assert text == TEXT
    items = body["ec_transfer_params"]["items"]
    assert [part["image_url"] for part in (first, second)] == [
        f"triptych-item:{item['mm_hash']}" for item in items
    ]
    assert {item["item_index"] for item in items} == {0, 1}
    assert len(system.encoder.jobs) == 2


async def test_images_that_tools_have_put_out(system: System) -> None:
    conversation = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [IMAGE, TEXT]},
    ]
    answer = await system.http.post("/v1/responses", json={"model": MODEL, "input": conversation})
    assert answer.json()["output"][0]["content"][0]["text"] == ANSWER
    assert system.prefill_decode.bodies[0]["input"][2]["output"][1] == TEXT


async def test_uploaded_files(storing: System) -> None:
    file = await storing.openai.files.create(file=("a.png", image_bytes(7)), purpose="vision")
    part = {"type": "input_image", "file_id": file.id, "detail": "auto"}
    answer = await storing.openai.responses.create(model=MODEL, input=user(part, TEXT))
    assert answer.output_text == ANSWER
    missing = {"type": "input_image", "file_id": "file-" + "0" * 32}
    with pytest.raises(openai.NotFoundError) as raised:
        await storing.openai.responses.create(model=MODEL, input=user(missing))
    assert raised.value.code == "file_not_found"


@pytest.mark.parametrize("images", [(), (IMAGE,)])
async def test_a_stream(system: System, images: tuple[Any, ...]) -> None:
    stream = await system.openai.responses.create(model=MODEL, input=user(*images, TEXT), stream=True)
    events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert [*(["1x8x8"] if images else []), "word0", "word1"] == deltas
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    labels = {"route": "/v1/responses", "model": MODEL, "modality": "image" if images else "text"}
    await system.assert_idle()
    assert value_of(system, "time_to_first_token_seconds_count", **labels) == 1
    assert value_of(system, "inter_token_latency_seconds_count", **labels) == len(deltas) - 1


@pytest.mark.parametrize("system", [QUICK], indirect=True)
async def test_without_encoders_the_whole_request_goes_to_an_instance(system: System) -> None:
    instance = await tower(system)
    await without_encoders(system)
    answer = await system.openai.responses.create(model=MODEL, input=user(IMAGE, TEXT))
    assert answer.output_text == ANSWER
    (body,) = instance.bodies
    assert body["input"][0]["content"][0]["image_url"].startswith("data:")


# ---- what is refused --------------------------------------------------------------------------------
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no input": ({}, "missing_field", "input"),
    "a number": ({"input": 5}, "invalid_type", "input"),
    "a file": (
        {"input": user({"type": "input_file", "file_id": "file-1"})},
        "unsupported_content_part",
        "input[0].content[0].type",
    ),
    "another form's image": (
        {"input": user(image_part())},
        "unsupported_content_part",
        "input[0].content[0].type",
    ),
    "an image without a URL": (
        {"input": user({"type": "input_image"})},
        "missing_image_url",
        "input[0].content[0].image_url",
    ),
    "an item's URL": (
        {"input": user({"type": "input_image", "image_url": "triptych-item:" + "0" * 64})},
        "invalid_image_url",
        "input[0].content[0].image_url",
    ),
    "an image in an answer": (
        {"input": [{"role": "assistant", "content": [IMAGE]}]},
        "unsupported_content_part",
        "input[0].content[0].type",
    ),
    "no detail": ({"input": user(IMAGE | {"detail": "much"})}, "invalid_value", "input[0].content[0].detail"),
    "a screenshot": (
        {"input": [{"type": "computer_call_output", "output": {"image_url": "http://127.0.0.1:1/x"}}]},
        "invalid_value",
        "input[0].type",
    ),
    "a name beside text": (
        {"input": user(TEXT | {"image": "x"})},
        "unexpected_field",
        "input[0].content[0].image",
    ),
    "a container": (
        {
            "input": "a",
            "tools": [
                {
                    "type": "namespace",
                    "name": "n",
                    "description": "d",
                    "tools": [{"type": "code_interpreter"}],
                }
            ],
        },
        "unsupported_tool",
        "tools[0].tools[0].type",
    ),
    "parameters of encoders": (
        {"input": "a", "ec_transfer_params": {}},
        "field_not_allowed",
        "ec_transfer_params",
    ),
    "a salt that is none": ({"input": "a", "cache_salt": ""}, "invalid_value", "cache_salt"),
    "messages of another format": (
        {"input": "a", "previous_input_messages": [{"role": "user"}]},
        "field_not_allowed",
        "previous_input_messages",
    ),
    "nothing that was stored": (
        {"input": "a", "previous_response_id": "resp_x"},
        "response_not_found",
        "response_id",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused(system: System, name: str) -> None:
    body, code, param = REFUSED[name]
    answer = await system.http.post("/v1/responses", json={"model": MODEL, **body})
    error = answer.json()["error"]
    status = 404 if code == "response_not_found" else 400
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), answer.text
    assert system.prefill_decode.bodies == []
    assert system.encoder.jobs == []


@pytest.mark.parametrize("system", [{"max_items": 1, "max_messages": 2}], indirect=True)
async def test_items_and_messages_are_bounded(system: System) -> None:
    for given, code in ((user(IMAGE, IMAGE), "too_many_items"), (user(TEXT) * 3, "invalid_value")):
        answer = await system.http.post("/v1/responses", json={"model": MODEL, "input": given})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


async def test_large_images_are_split_off_as_they_come(system: System) -> None:
    noisy = bytes(range(256)) * 64
    part = {"type": "input_image", "image_url": data_url(image_bytes(3, (64, 64)) + noisy)}
    answer = await system.openai.responses.create(model=MODEL, input=user(part, TEXT))
    assert answer.output_text == "1x64x64 word0 word1"
