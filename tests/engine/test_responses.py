"""Responses on real engines: the JSON of vLLM's own server, but for ids, times and what its caches had."""

import base64
import json
from itertools import groupby
from types import ModuleType
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.real.answers import post
from tests.support.real.bodies.comparing import alike
from tests.support.real.system import MODEL, Server, System

pytestmark = pytest.mark.engine

OWN = {"id", "item_id", "call_id", "created_at", "previous_response_id", "input_tokens_details"}
GREEDY = {"temperature": 0, "max_output_tokens": 8}
PROMPT = "read the digits 1 2 3"
PATH = "/v1/responses"
ONE, TWO = "<one>", "<two>"  # images, in bodies of this module
TEXT = {"type": "input_text", "text": "read the digits"}
FUNCTION = {
    "type": "function", "name": "add", "description": "adds", "strict": True,
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"digit": {"enum": [1, 2]}}, "required": ["digit"]}


def image(name: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": name, "detail": "auto"}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
BODIES: dict[str, dict[str, Any]] = {
    "text": {"input": PROMPT},
    "default length": {"input": PROMPT, "max_output_tokens": None},
    "no model": {"input": PROMPT, "model": None},
    "instructions": {"input": PROMPT, "instructions": "read what you see"},
    "messages": {"input": [{"role": "developer", "content": "short"}, {"role": "user", "content": PROMPT}]},
    "typed messages": {"input": [{"type": "message", "role": "user", "content": [TEXT, TEXT]}]},
    "a conversation": {
        "input": [
            {"role": "user", "content": PROMPT},
            {"type": "message", "role": "assistant",
             "content": [{"type": "output_text", "text": "1 2", "annotations": []}]},
            {"role": "user", "content": "and then?"},
        ]
    },
    "an image": {"input": user(image(ONE), TEXT)},
    "an image without its detail": {"input": user({"type": "input_image", "image_url": ONE}, TEXT)},
    "an image behind the text": {"input": user(TEXT, image(ONE))},
    "two images": {"input": user(image(ONE), TEXT, image(TWO))},
    "the same image twice": {"input": user(image(ONE), image(ONE), TEXT)},
    "an image and instructions": {"input": user(image(ONE), TEXT), "instructions": "read what you see"},
    "images in two messages": {"input": user(image(ONE)) + user(image(TWO), TEXT)},
    "a tool's output": {
        "input": [
            {"role": "user", "content": PROMPT},
            CALL,
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
        ]
    },
    "an image that a tool puts out": {
        "input": [
            {"role": "user", "content": PROMPT},
            CALL,
            {"type": "function_call_output", "call_id": "c1", "output": [image(ONE), TEXT]},
        ]
    },
    "reasoning from before": {
        "input": [
            {"role": "user", "content": PROMPT},
            {"type": "reasoning", "id": "r", "summary": [],
             "content": [{"type": "reasoning_text", "text": "t"}]},
            {"role": "assistant", "content": "1 2"},
            {"role": "user", "content": "and then?"},
        ]
    },
    "tools": {"input": PROMPT, "tools": [FUNCTION]},
    "no tool": {"input": PROMPT, "tools": [FUNCTION], "tool_choice": "none"},
    "a custom tool": {"input": PROMPT, "tools": [{"type": "custom", "name": "free", "description": "d"}]},
    "json": {"input": PROMPT, "text": {"format": {"type": "json_object"}}, "max_output_tokens": 4},
    "a schema": {
        "input": PROMPT,
        "text": {"format": {"type": "json_schema", "name": "d", "schema": SCHEMA}},
        "max_output_tokens": 24,
    },
    "a choice": {"input": user(image(ONE), TEXT), "structured_outputs": {"choice": ["yes", "no"]}},
    "sampling": {"input": PROMPT, "temperature": 0.8, "top_p": 0.9, "seed": 11},
    "penalties": {"input": PROMPT, "presence_penalty": 0.5, "frequency_penalty": 0.4, "seed": 2},
    "stop": {"input": PROMPT, "stop": ["1", " "], "max_output_tokens": 24},
    "logprobs": {"input": PROMPT, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "logit bias": {"input": PROMPT, "logit_bias": {"7": 100.0}},
    "not stored": {"input": PROMPT, "store": False},
    "metadata": {"input": PROMPT, "metadata": {"a": "b"}, "user": "me", "service_tier": "auto"},
    "reasoning effort": {"input": PROMPT, "reasoning": {"effort": "low"}, "include_reasoning": False},
    "raw messages": {"input": PROMPT, "enable_response_messages": True},
    "unknown field": {"input": PROMPT, "not_known_to_anyone": 1},
}  # fmt: skip
STREAMED = (
    "text", "instructions", "an image", "two images", "an image that a tool puts out", "tools", "a schema",
    "logprobs", "raw messages",
)  # fmt: skip
CHAINS: dict[str, list[dict[str, Any]]] = {
    "text": [{"input": PROMPT}, {"input": "and then?"}, {"input": "and then?", "instructions": "be brief"}],
    "an image at first": [{"input": user(image(ONE), TEXT)}, {"input": "again"}, {"input": user(TEXT)}],
    "an image later": [{"input": PROMPT}, {"input": user(TEXT, image(ONE))}, {"input": "again"}],
    "images all along": [
        {"input": user(image(ONE), TEXT), "instructions": "read"},
        {"input": user(image(TWO), TEXT)},
        {"input": user(image(ONE), image(TWO)), "max_output_tokens": 16},
    ],
    "an image in a system message": [
        {"input": [{"role": "system", "content": [image(ONE), TEXT]}, {"role": "user", "content": PROMPT}]},
        {"input": "again"},
    ],
}
FAULTY: dict[str, dict[str, Any]] = {
    "negative temperature": {"input": PROMPT, "temperature": -1},
    "no such truncation": {"input": PROMPT, "truncation": "some"},
    "too long": {"input": "read the digits " * 4000},
    "an unknown item": {"input": [{"type": "item_reference", "id": "x"}]},
    "an unknown role": {"input": [{"role": "nobody", "content": "a"}]},
    "nothing stored": {"input": PROMPT, "previous_response_id": "resp_" + "0" * 32},
    "a background that is not stored": {"input": PROMPT, "background": True, "store": False},
    "a tool that is not there": {"input": PROMPT, "tool_choice": {"type": "function", "name": "f"}},
    "tools are required": {"input": PROMPT, "tool_choice": "required"},
    "two formats": {
        "input": PROMPT,
        "text": {"format": {"type": "json_object"}},
        "structured_outputs": {"choice": ["a"]},
    },
    "a template": {"input": PROMPT, "prompt": {"id": "p"}},
    "a grammar": {
        "input": PROMPT,
        "tools": [{"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark",
                                                             "definition": "x"}}],
    },
    "reasoning that is hidden": {
        "input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}]
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def images(strips: ModuleType) -> dict[str, str]:
    pngs = [strip.png for strip in strips.held_out_strips(2, length=3, seed=31)]
    urls = [f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in pngs]
    return dict(zip((ONE, TWO), urls, strict=True))


def filled(body: Any, images: dict[str, str]) -> Any:
    """With the images themselves."""
    text = json.dumps(body)
    for name, url in images.items():
        text = text.replace(name, url)
    return json.loads(text)


def shown(value: Any) -> Any:
    """Without what each answer has of its own."""
    if isinstance(value, dict):
        return {name: shown(each) for name, each in value.items() if name not in OWN}
    return [shown(each) for each in value] if isinstance(value, list) else value


def answer_of(response: httpx.Response) -> Any:
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    return shown(response.json())


def events_of(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    events = []
    for each in response.text.strip().split("\n\n"):
        name, data = each.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def joined(events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """What a stream says: how tokens are grouped depends on time alone."""
    numbers = [data["sequence_number"] for _, data in events]
    assert numbers == list(range(len(events)))
    return {
        "names": [name for name, _ in groupby(events, key=lambda event: event[0])],
        "text": "".join(data["delta"] for name, data in events if name.endswith(".delta")),
        "last": shown(events[-1][1]["response"]),
    }


@pytest.mark.parametrize("name", BODIES)
def test_responses_equal_the_monoliths(
    system: System, monolith: Server, images: dict[str, str], name: str
) -> None:
    body = filled(GREEDY | BODIES[name], images)
    got, wanted = (answer_of(post(server, PATH, body)) for server in (system, monolith))
    assert alike(got, wanted), f"got {got}\nwanted {wanted}"


@pytest.mark.parametrize("name", STREAMED)
def test_streamed_responses_equal_the_monoliths(
    system: System, monolith: Server, images: dict[str, str], name: str
) -> None:
    body = filled(GREEDY | BODIES[name], images) | {"stream": True}
    got, wanted = (joined(events_of(post(server, PATH, body))) for server in (system, monolith))
    assert alike(got, wanted), f"got {got}\nwanted {wanted}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_conversations_equal_the_monoliths(
    system: System, monolith: Server, images: dict[str, str], name: str, stream: bool
) -> None:
    said: list[list[Any]] = []
    for server in (system, monolith):
        previous, answers = None, []
        for step in CHAINS[name]:
            body = filled(GREEDY | step, images) | {"previous_response_id": previous, "stream": stream}
            response = post(server, PATH, body)
            answer = events_of(response)[-1][1]["response"] if stream else response.json()
            assert "output" in answer, response.text
            assert answer["previous_response_id"] == previous
            previous = answer["id"]
            answers.append(shown(answer))
        said.append(answers)
    assert alike(*said), f"got {said[0]}\nwanted {said[1]}"


FOUND_BY_THE_GATEWAY = {"an unknown item", "an unknown role"}


@pytest.mark.parametrize("name", FAULTY)
def test_refusals_have_vllms_status_and_words(system: System, monolith: Server, name: str) -> None:
    got, wanted = (post(server, PATH, FAULTY[name]) for server in (system, monolith))
    case = f"got {got.status_code} {got.text}\nwanted {wanted.status_code} {wanted.text}"
    assert got.status_code == wanted.status_code, case
    assert wanted.status_code != 200, case
    error = got.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, case
    assert isinstance(error["code"], str), case
    if name not in FOUND_BY_THE_GATEWAY:
        assert error["message"] == wanted.json()["error"]["message"], case


def test_stored_responses_by_openais_client(system: System, monolith: Server) -> None:
    said: list[list[Any]] = []
    for server in (system, monolith):
        with server.openai as client:
            said.append(_stored(client))
    assert said[0] == said[1]


def _stored(client: OpenAI) -> list[Any]:
    """What becomes of responses, step by step."""
    plain = client.responses.create(model=MODEL.name, input=PROMPT, temperature=0, max_output_tokens=8)
    again = client.responses.retrieve(plain.id)
    running = client.responses.create(
        model=MODEL.name,
        input=PROMPT,
        background=True,
        max_output_tokens=2000,
        extra_body={"ignore_eos": True},
    )
    cancelled = client.responses.cancel(running.id)
    stream = client.responses.create(
        model=MODEL.name, input=PROMPT, background=True, stream=True, temperature=0, max_output_tokens=4
    )
    events = list(stream)
    response_id = events[0].response.id
    late = list(client.responses.retrieve(response_id, stream=True, starting_after=1))
    return [
        again.output_text == plain.output_text,
        plain.output_text,
        running.status,
        cancelled.status,
        client.responses.retrieve(running.id).status,
        [kind for kind, _ in groupby(event.type for event in events)],
        [event.sequence_number for event in late] == [event.sequence_number for event in events[2:]],
        client.responses.retrieve(response_id).status,
    ]
