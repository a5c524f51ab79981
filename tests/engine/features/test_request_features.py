"""What a request can ask of vLLM, with images: the same JSON as vLLM's own server, streamed and whole.

Each request brings an image that is new to the system, so it is parked, or begins in part, until the image is
encoded; its stream is asked for afterwards, with a second new image.
"""

from types import ModuleType
from typing import Any

import pytest

from tests.support.real.answers import answer_of, events_of, joined_chat, post
from tests.support.real.bodies.comparing import alike
from tests.support.real.system import Server, System, image_part

pytestmark = pytest.mark.engine

GREEDY = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
DIGITS_SCHEMA = {
    "type": "object",
    "properties": {"digits": {"type": "string", "pattern": "^[0-9]{3}$"}, "even": {"type": "boolean"}},
    "required": ["digits", "even"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= digit " and " digit\ndigit ::= "one" | "two" | "three" | "nine"\n'
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "d", "schema": DIGITS_SCHEMA}},
        "max_tokens": 60,
    },
    "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 30},
    "structured_outputs.json": {"structured_outputs": {"json": DIGITS_SCHEMA}, "max_tokens": 60},
    "structured_outputs.regex": {"structured_outputs": {"regex": "[0-9]{2}-[a-f]{3}"}},
    "structured_outputs.choice": {"structured_outputs": {"choice": ["one two", "three", "nine"]}},
    "structured_outputs.grammar": {"structured_outputs": {"grammar": GRAMMAR}, "max_tokens": 30},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "n": {"n": 3, "temperature": 1.0, "seed": 11},
    "best_of": {"best_of": 2},
    "stop": {"stop": ["1", "2", "3", "4"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": list(range(26, 36))},
    "seed": {"temperature": 1.0, "seed": 5},
    "top_k, top_p, min_p": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 7},
    "penalties": {
        "presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "min_tokens": 12,
    },
    "logit_bias": {"logit_bias": {"30": 20.0, "31": -20.0}},
    "bad_words": {"bad_words": ["1", "2"]},
    "allowed_token_ids": {"allowed_token_ids": [2, 26, 27, 28]},
    "ignore_eos": {"ignore_eos": True, "min_tokens": 12},
}  # fmt: skip
NOT_STREAMED = frozenset({"prompt_logprobs"})  # by vLLM


def question(strips: ModuleType, seed: int) -> list[dict[str, Any]]:
    """Two images that no other question has, and text in front, between and behind."""
    first, second = (image_part(strip.png) for strip in strips.held_out_strips(2, length=None, seed=seed))
    text = {"type": "text", "text": "read the digits"}
    return [{"role": "user", "content": [text, first, text, second, text]}]


def seed_of(name: str) -> int:
    return 700 + 2 * list(REQUESTS).index(name)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_feature(system: System, monolith: Server, strips: ModuleType, name: str) -> None:
    body = GREEDY | REQUESTS[name] | {"messages": question(strips, seed_of(name))}
    got, wanted = (answer_of(post(server, "/v1/chat/completions", body)) for server in (system, monolith))
    assert alike(got, wanted), f"got {got}\nwanted {wanted}"
    assert wanted["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", [each for each in REQUESTS if each not in NOT_STREAMED])
def test_a_request_feature_streamed(system: System, monolith: Server, strips: ModuleType, name: str) -> None:
    body = GREEDY | REQUESTS[name] | {"stream": True, "stream_options": {"include_usage": True}}
    body["messages"] = question(strips, seed_of(name) + 1)
    got, wanted = (
        joined_chat(events_of(post(server, "/v1/chat/completions", body))) for server in (system, monolith)
    )
    assert alike(got, wanted), f"got {got}\nwanted {wanted}"
    assert wanted["choices"][0]["end"]


def test_beam_search_is_refused_with_images(system: System, strips: ModuleType) -> None:
    """vLLM asks its engine for each beam without saying which items the request has."""
    body = GREEDY | {"use_beam_search": True, "n": 2, "messages": question(strips, 692)}
    answer = post(system, "/v1/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "use_beam_search"), answer.text


def test_continue_final_message(system: System, monolith: Server, strips: ModuleType) -> None:
    messages = [*question(strips, 690), {"role": "assistant", "content": "the digits are 4"}]
    body = GREEDY | {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    got, wanted = (answer_of(post(server, "/v1/chat/completions", body)) for server in (system, monolith))
    assert alike(got, wanted), f"got {got}\nwanted {wanted}"


def test_echo_of_a_final_message(system: System, monolith: Server, strips: ModuleType) -> None:
    messages = [*question(strips, 691), {"role": "assistant", "content": "4"}]
    body = GREEDY | {"messages": messages, "echo": True, "continue_final_message": True}
    body["add_generation_prompt"] = False
    got, wanted = (answer_of(post(server, "/v1/chat/completions", body)) for server in (system, monolith))
    assert alike(got, wanted), f"got {got}\nwanted {wanted}"
    assert wanted["choices"][0]["message"]["content"].startswith("4")
