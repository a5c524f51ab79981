"""Tools, with images in the request: called as vLLM's own server calls them, whole and streamed."""

from types import ModuleType
from typing import Any

import pytest

from tests.support.real.answers import answer_of, events_of, joined_chat, post, without_call_ids
from tests.support.real.bodies.comparing import alike
from tests.support.real.system import Server, System, image_part

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
TEXT = {"type": "text", "text": "read the digits"}
# The penalty: between two parts of JSON any space may stand, and this model would write it without end.
BODY = {"temperature": 0, "max_tokens": 200, "frequency_penalty": 2.0, "return_token_ids": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
FUNCTION: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "report",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"digits": {"type": "string", "pattern": "^[0-9]{3}$"}},
            "required": ["digits"],
            "additionalProperties": False,
        },
    },
}
CALL = r'<tool_call>\n\{"name": "report", "arguments": \{"digits": "[0-9]{3}"\}\}\n</tool_call>'
LOOSE = {**FUNCTION, "function": {**FUNCTION["function"], "strict": False}}
TOOLS: dict[str, dict[str, Any]] = {
    # A model without training in tools calls none by itself: a regular expression has it write a call.
    "auto": {"tools": [LOOSE], "tool_choice": "auto", "structured_outputs": {"regex": CALL}},
    "required": {"tools": [FUNCTION], "tool_choice": "required"},
    "named": {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "report"}}},
}


def question(strips: ModuleType, seed: int) -> list[dict[str, Any]]:
    """Two images that no other question has."""
    first, second = (image_part(strip.png) for strip in strips.held_out_strips(2, length=None, seed=seed))
    return [{"role": "user", "content": [TEXT, first, TEXT, second, TEXT]}]


@pytest.mark.parametrize("choice", TOOLS)
def test_tools(system: System, monolith: Server, strips: ModuleType, choice: str) -> None:
    seed = 780 + 2 * list(TOOLS).index(choice)
    body = BODY | TOOLS[choice] | {"messages": question(strips, seed)}
    got, wanted = (without_call_ids(answer_of(post(each, CHAT, body))) for each in (system, monolith))
    assert alike(got, wanted), f"got {got}\nwanted {wanted}"
    (call,) = wanted["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "report"
    assert '"digits"' in call["function"]["arguments"]


@pytest.mark.parametrize("choice", TOOLS)
def test_tools_streamed(system: System, monolith: Server, strips: ModuleType, choice: str) -> None:
    seed = 781 + 2 * list(TOOLS).index(choice)
    body = BODY | TOOLS[choice] | STREAM | {"messages": question(strips, seed)}
    got, wanted = (joined_chat(events_of(post(each, CHAT, body))) for each in (system, monolith))
    assert alike(got, wanted), f"got {got}\nwanted {wanted}"
    tool = wanted["choices"][0]["tools"][0]
    assert tool["name"] == "report"
    assert '"digits"' in tool["arguments"]
