"""Anthropic's Messages API on real engines: the JSON of vLLM's own server, but for ids and signatures."""

import base64
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import anthropic
import httpx
import pytest

from tests.support.real.answers import post
from tests.support.real.bodies.comparing import alike
from tests.support.real.system import MODEL, Server, System, image_part
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

PATH = "/v1/messages"
GREEDY = {"temperature": 0, "max_tokens": 12}
OWN = {"id", "signature"}  # of each answer, and of blocks in it
TOOL = {
    "name": "read",
    "description": "reads digits",
    "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
}
Images = Callable[[int], dict[str, Any]]


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return user(*content) | {"role": "assistant"}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def result(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": list(content)}


ASK = text("read the digits")
CALL = {"type": "tool_use", "id": "t1", "name": "read", "input": {"n": 3}}
BODIES: dict[str, Callable[[Images], dict[str, Any]]] = {
    "text": lambda image: {"messages": [user("read the digits")]},
    "text blocks": lambda image: {"messages": [user(text("read "), text("the digits"))]},
    "system": lambda image: {"system": "you read", "messages": [user("digits")]},
    "system blocks": lambda image: {"system": [text("you"), text(" read")], "messages": [user("digits")]},
    "system in between": lambda image: {
        "messages": [user("a"), assistant("b"), {"role": "system", "content": "c"}, user("digits")]
    },
    "a line that vLLM drops": lambda image: {
        "system": [text("x-anthropic-billing-header: 1"), text("read")],
        "messages": [user("digits")],
    },
    "conversation": lambda image: {"messages": [user("read"), assistant("1 2 3"), user("again")]},
    "one token": lambda image: {"max_tokens": 1, "messages": [user("digits")]},
    "stop": lambda image: {"stop_sequences": ["1", "2", " ", "e"], "messages": [user("digits")]},
    "seedless sampling of one": lambda image: {"top_k": 1, "top_p": 0.5, "messages": [user("digits")]},
    "thinking before": lambda image: {
        "messages": [
            user("read"),
            assistant({"type": "thinking", "thinking": "so", "signature": "s"}, text("1 2")),
            user("again"),
        ]
    },
    "thinking off": lambda image: {"thinking": {"type": "disabled"}, "messages": [user("digits")]},
    "redacted": lambda image: {
        "messages": [user("a"), assistant({"type": "redacted_thinking", "data": "x"}, ASK), user("b")]
    },
    "metadata": lambda image: {"metadata": {"user_id": "u"}, "unknown": 1, "messages": [user("digits")]},
    "image": lambda image: {"messages": [user(image(0), ASK)]},
    "image behind text": lambda image: {"messages": [user(ASK, image(0))]},
    "image alone": lambda image: {"messages": [user(image(1))]},
    "two images": lambda image: {"messages": [user(image(0), text(" and "), image(1), ASK)]},
    "the same image twice": lambda image: {"messages": [user(image(0), image(0), ASK)]},
    "images in two turns": lambda image: {
        "messages": [user(image(0), ASK), assistant("1 2 3"), user(image(1), ASK)]
    },
    "image by data URL": lambda image: {
        "messages": [user({"type": "image", "source": {"type": "url", "url": data_url(image(2))}}, ASK)]
    },
    "image without a type": lambda image: {
        "messages": [user({"type": "image", "source": {"data": image(1)["source"]["data"]}}, ASK)]
    },
    "image of an assistant": lambda image: {
        "messages": [user("a"), assistant(image(1), text("b")), user(ASK)]
    },
    "image and system": lambda image: {"system": "you read", "messages": [user(image(2), ASK)]},
    "tool result": lambda image: {
        "tools": [TOOL],
        "tool_choice": {"type": "none"},
        "messages": [user("read"), assistant(CALL), user(result(text("1 2"), text("3")))],
    },
    "tool result as text": lambda image: {
        "messages": [
            user("read"),
            assistant(text("so"), CALL),
            user({"type": "tool_result", "tool_use_id": "t1", "content": "1 2 3"}, ASK),
        ]
    },
    "image in a tool result": lambda image: {
        "messages": [user("read"), assistant(CALL), user(result(text("here"), image(0)), ASK)]
    },
    "images around a tool result": lambda image: {
        "messages": [user("read"), assistant(CALL), user(image(0), result(image(1), image(2)), ASK, image(0))]
    },
    "tools of the model's own choice": lambda image: {"tools": [TOOL], "messages": [user(image(0), ASK)]},
    "any tool": lambda image: {
        "max_tokens": 40,
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
        "messages": [user(image(1), ASK)],
    },
    "a tool by name": lambda image: {
        "max_tokens": 40,
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "read"},
        "messages": [user(image(2), ASK)],
    },
    "as a schema says": lambda image: {
        "max_tokens": 40,
        "output_config": {"format": {"type": "json_schema", "schema": TOOL["input_schema"]}},
        "messages": [user(image(2), ASK)],
    },
}
FAULTY: dict[str, dict[str, Any]] = {
    "no length": {"messages": [user("a")], "max_tokens": None},
    "negative length": {"messages": [user("a")], "max_tokens": -1},
    "negative temperature": {"messages": [user("a")], "temperature": -1},
    "too long": {"messages": [user("read the digits " * 4000)]},
    "thinking longer than the answer": {
        "messages": [user("a")],
        "max_tokens": 1024,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
    "a tool without a schema": {"messages": [user("a")], "tools": [{"name": "f"}]},
    "a choice without a name": {"messages": [user("a")], "tools": [TOOL], "tool_choice": {"type": "tool"}},
    "thinking without a parser": {
        "messages": [user("a")],
        "max_tokens": 1030,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
    "unknown model": {"model": "other", "messages": [user("a")]},
}


def data_url(block: dict[str, Any]) -> str:
    return f"data:image/png;base64,{block['source']['data']}"


@pytest.fixture(scope="module")
def image(strips: ModuleType) -> Images:
    """Blocks of held-out strips."""
    pngs = [strip.png for strip in strips.held_out_strips(3, seed=83)]

    def block(index: int) -> dict[str, Any]:
        data = base64.b64encode(pngs[index]).decode()
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    return block


def shown(value: Any) -> Any:
    """Without what each answer has of its own."""
    if isinstance(value, dict):
        return {name: shown(each) for name, each in value.items() if name not in OWN}
    return [shown(each) for each in value] if isinstance(value, list) else value


def case_of(*responses: httpx.Response) -> str:
    got, wanted = (f"{each.status_code} {each.text}" for each in responses)
    return f"got {got}\nwanted {wanted}"


def joined(response: httpx.Response) -> list[Any]:
    """Events; deltas of a block are one, since how tokens are grouped depends on time alone."""
    events: list[Any] = []
    for each in response.text.strip().split("\n\n"):
        name, data = each.split("\n")
        event = shown(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {event['type']}"
        last = events[-1] if events else {}
        delta, before = event.get("delta", {}), last.get("delta", {})
        kind = delta.get("type")
        if kind is not None and kind == before.get("type") and last["index"] == event["index"]:
            for part in ("text", "thinking", "partial_json"):
                if part in delta:
                    before[part] += delta[part]
        else:
            events.append(event)
    return events


@pytest.mark.parametrize("name", BODIES)
def test_messages_equal_the_monoliths(system: System, monolith: Server, image: Images, name: str) -> None:
    body = GREEDY | BODIES[name](image)
    got, wanted = (post(server, PATH, body) for server in (system, monolith))
    assert got.status_code == wanted.status_code == 200, case_of(got, wanted)
    assert alike(shown(got.json()), shown(wanted.json())), case_of(got, wanted)


@pytest.mark.parametrize("name", BODIES)
def test_streams_equal_the_monoliths(system: System, monolith: Server, image: Images, name: str) -> None:
    body = GREEDY | BODIES[name](image) | {"stream": True}
    got, wanted = (post(server, PATH, body) for server in (system, monolith))
    assert got.status_code == wanted.status_code == 200, case_of(got, wanted)
    assert alike(joined(got), joined(wanted)), case_of(got, wanted)
    assert joined(got)[-1] == {"type": "message_stop"}


@pytest.mark.parametrize("name", BODIES)
def test_counts_equal_the_monoliths(system: System, monolith: Server, image: Images, name: str) -> None:
    names = {"messages", "system", "tools", "tool_choice", "thinking", "output_config"}
    body = {key: value for key, value in BODIES[name](image).items() if key in names}
    got, wanted = (post(server, f"{PATH}/count_tokens", body) for server in (system, monolith))
    assert (got.status_code, got.json()) == (wanted.status_code, wanted.json()), case_of(got, wanted)


FOUND_BY_THE_GATEWAY = {"unknown model", "a tool without a schema"}


@pytest.mark.parametrize("name", FAULTY)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_vllms_status_and_words(
    system: System, monolith: Server, name: str, stream: bool
) -> None:
    body = GREEDY | FAULTY[name] | {"stream": stream}
    got, wanted = (post(server, PATH, body) for server in (system, monolith))
    is_hidden = stream and wanted.status_code == 200  # vLLM tells it in the stream, and not what it is
    assert got.status_code == (400 if is_hidden else wanted.status_code) >= 400, case_of(got, wanted)
    answer = got.json()
    assert answer.keys() == {"type", "error"}
    assert answer["error"].keys() == {"type", "message"}
    if name not in FOUND_BY_THE_GATEWAY and not is_hidden:
        assert answer["error"]["message"] == wanted.json()["error"]["message"], case_of(got, wanted)


def test_an_image_is_the_same_item_as_in_a_chat_completion(system: System, strips: ModuleType) -> None:
    (strip,) = strips.held_out_strips(1, seed=84)
    data = base64.b64encode(strip.png).decode()
    source: Any = {"type": "base64", "media_type": "image/png", "data": data}
    message: Any = user({"type": "image", "source": source}, ASK)
    chat = system.ask([image_part(strip.png), ASK])
    num_entries = system.store_stats().num_entries
    url = system.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(
            model=MODEL.name, max_tokens=24, messages=[message], extra_body={"temperature": 0}
        )
        counted = client.messages.count_tokens(model=MODEL.name, messages=[message])
    (answered,) = answer.content
    assert answered.type == "text"
    assert answered.text == chat.text
    assert counted.input_tokens == answer.usage.input_tokens
    assert system.store_stats().num_entries == num_entries


def test_counting_leaves_nothing_behind(system: System, strips: ModuleType) -> None:
    (strip,) = strips.held_out_strips(1, seed=85)
    data = base64.b64encode(strip.png).decode()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    for _ in range(3):
        counted = post(system, f"{PATH}/count_tokens", {"messages": [user(block, ASK)]})
        assert counted.status_code == 200, counted.text
    wait_until(lambda: not system.store_stats().num_pins, 20, "no pin is left")
    assert system.ask([image_part(strip.png), ASK]).text
