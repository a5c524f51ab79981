"""Completions, tokens and batches on real engines: the JSON of vLLM's own server, but for ids and times."""

import json
from typing import Any

import httpx
import pytest

from tests.support.real.system import MODEL, Server, System
from triptych_gateway.endpoints.endpoint import EndpointKind
from triptych_gateway.endpoints.table import FORWARDED

pytestmark = pytest.mark.engine

OWN = {"id", "created"}  # of each answer
GREEDY = {"temperature": 0, "max_tokens": 8}
PROMPT = "read the digits 1 2 3"
USER = {"role": "user", "content": "read the digits"}

COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": PROMPT},
    "default length": {"prompt": PROMPT, "max_tokens": None},
    "no model": {"prompt": PROMPT, "model": None},
    "several prompts": {"prompt": [PROMPT, "digits", "read"]},
    "token ids": {"prompt": [5, 6, 7, 8]},
    "lists of token ids": {"prompt": [[5, 6, 7], [8, 9]]},
    "n": {"prompt": PROMPT, "n": 3, "temperature": 1.0, "seed": 11},
    "n of several prompts": {"prompt": [PROMPT, "digits"], "n": 2, "temperature": 0.7, "seed": 3},
    "logprobs": {"prompt": PROMPT, "logprobs": 3},
    "echo": {"prompt": PROMPT, "echo": True},
    "echo with logprobs": {"prompt": PROMPT, "echo": True, "logprobs": 2},
    "echo alone": {"prompt": PROMPT, "echo": True, "max_tokens": 0},
    "prompt logprobs": {"prompt": PROMPT, "prompt_logprobs": 1},
    "stop": {"prompt": PROMPT, "stop": ["1", "2", " "], "max_tokens": 24},
    "stop included": {"prompt": PROMPT, "stop": [" "], "include_stop_str_in_output": True, "max_tokens": 24},
    "stop by token": {"prompt": PROMPT, "stop_token_ids": [5, 6, 7, 8, 9, 10, 11, 12]},
    "ignore eos": {"prompt": PROMPT, "ignore_eos": True, "min_tokens": 8},
    "penalties": {"prompt": PROMPT, "presence_penalty": 0.5, "frequency_penalty": 0.4, "seed": 2},
    "logit bias": {"prompt": PROMPT, "logit_bias": {"7": 100.0}},
    "token ids in the answer": {"prompt": PROMPT, "return_token_ids": True},
    "unknown field": {"prompt": PROMPT, "not_known_to_anyone": 1},
}
FAULTY: dict[str, tuple[str, dict[str, Any]]] = {
    "no prompt": ("/v1/completions", {}),
    "negative length": ("/v1/completions", {"prompt": PROMPT, "max_tokens": -1}),
    "negative temperature": ("/v1/completions", {"prompt": PROMPT, "temperature": -1}),
    "too many logprobs": ("/v1/completions", {"prompt": PROMPT, "logprobs": 1000}),
    "negative logprobs": ("/v1/completions", {"prompt": PROMPT, "logprobs": -2}),
    "n is none": ("/v1/completions", {"prompt": PROMPT, "n": 0}),
    "suffix": ("/v1/completions", {"prompt": PROMPT, "suffix": "x"}),
    "too long": ("/v1/completions", {"prompt": "read the digits " * 4000}),
    "no token": ("/v1/completions", {"prompt": [10**9]}),
    "stream options without a stream": (
        "/v1/completions",
        {"prompt": PROMPT, "stream_options": {"include_usage": True}},
    ),
    "priority": ("/v1/completions", {"prompt": PROMPT, "priority": 3}),
    "unknown model": ("/v1/completions", {"prompt": PROMPT, "model": "other"}),
    "nothing to tokenize": ("/tokenize", {}),
    "both ends": (
        "/tokenize",
        {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
    ),
    "nothing to detokenize": ("/detokenize", {}),
    "no token to detokenize": ("/detokenize", {"tokens": [10**9]}),
    "batch streamed": ("/v1/chat/completions/batch", {"messages": [[USER]], "stream": True}),
    "batch with tools": (
        "/v1/chat/completions/batch",
        {"messages": [[USER]], "tools": [{"type": "function", "function": {"name": "f"}}]},
    ),
    "empty batch": ("/v1/chat/completions/batch", {"messages": []}),
}
TOKENS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/tokenize", {"prompt": PROMPT}),
    "text without special tokens": ("/tokenize", {"prompt": PROMPT, "add_special_tokens": False}),
    "strings": ("/tokenize", {"prompt": PROMPT, "return_token_strs": True}),
    "placeholders": ("/tokenize", {"prompt": "an <|image_pad|> alone"}),
    "chat": ("/tokenize", {"messages": [USER]}),
    "chat of parts": (
        "/tokenize",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    ),
    "chat without the answer's beginning": (
        "/tokenize",
        {"messages": [USER], "add_generation_prompt": False, "return_token_strs": True},
    ),
    "text again": ("/detokenize", {"tokens": [5, 6, 7, 8]}),
    "no text": ("/detokenize", {"tokens": []}),
}


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    url = server.base_url.removesuffix("/v1") + path
    named = {"model": MODEL.name, **body}
    sent = {name: value for name, value in named.items() if name != "model" or value is not None}
    return httpx.post(url, json=sent, timeout=120, trust_env=False)


def alike(one: Any, other: Any) -> bool:
    """The same JSON, with numbers that were computed alike."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, abs=1e-3)
    return bool(one == other)


def shown(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what each answer has of its own."""
    kept = {name: value for name, value in answer.items() if name not in OWN}
    if isinstance(
        kept.get("system_fingerprint"), str
    ):  # vLLM's version, and a digest of the engine's options
        kept["system_fingerprint"] = kept["system_fingerprint"].rpartition("-")[0]
    return kept


def answer_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    return shown(response.json())


def events_of(response: httpx.Response) -> list[Any]:
    """Of a stream; chunks are joined by choice, since how tokens are grouped depends on time alone."""
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    events = [each.removeprefix("data: ") for each in response.text.strip().split("\n\n")]
    assert events.pop() == "[DONE]"
    return [shown(json.loads(each)) for each in events]


def joined(events: list[Any]) -> dict[str, Any]:
    """What a stream says in the end."""
    said: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            known = said.setdefault(choice["index"], {"text": "", "tokens": [], "logprobs": []})
            known["text"] += choice["text"]
            known["tokens"] += choice.get("token_ids") or []
            known["logprobs"] += (choice.get("logprobs") or {}).get("token_logprobs") or []
            known["end"] = choice.get("finish_reason") or known.get("end")
            known["stop"] = choice.get("stop_reason") or known.get("stop")
    return {"usage": usage, "choices": said, "names": sorted({name for event in events for name in event})}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions_equal_the_monoliths(system: System, monolith: Server, name: str) -> None:
    body = GREEDY | COMPLETIONS[name]
    got, wanted = (answer_of(post(server, "/v1/completions", body)) for server in (system, monolith))
    assert alike(got, wanted), f"got {got}\nwanted {wanted}"


@pytest.mark.parametrize("name", COMPLETIONS)
def test_streamed_completions_equal_the_monoliths(system: System, monolith: Server, name: str) -> None:
    body = GREEDY | COMPLETIONS[name] | {"stream": True, "stream_options": {"include_usage": True}}
    responses = [post(server, "/v1/completions", body) for server in (system, monolith)]
    if responses[1].status_code != 200:  # vLLM streams no such answer
        assert responses[0].status_code == responses[1].status_code, responses[0].text
        return
    got, wanted = (joined(events_of(response)) for response in responses)
    assert alike(got, wanted), f"got {got}\nwanted {wanted}"
    assert wanted["choices"]


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_equal_the_monoliths(system: System, monolith: Server, name: str) -> None:
    got, wanted = (answer_of(post(server, *TOKENS[name])) for server in (system, monolith))
    assert got == wanted


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_batch_equals_the_monoliths(system: System, monolith: Server, logprobs: bool) -> None:
    body = GREEDY | {"messages": [[USER], [{"role": "user", "content": "digits"}]], "logprobs": logprobs}
    got, wanted = (
        answer_of(post(server, "/v1/chat/completions/batch", body)) for server in (system, monolith)
    )
    assert alike(got, wanted), f"got {got}\nwanted {wanted}"
    assert len(wanted["choices"]) == 2


@pytest.mark.parametrize("name", FAULTY)
def test_refusals_have_vllms_status_and_words(system: System, monolith: Server, name: str) -> None:
    path, body = FAULTY[name]
    got, wanted = (post(server, path, body) for server in (system, monolith))
    case = f"got {got.status_code} {got.text}\nwanted {wanted.status_code} {wanted.text}"
    assert got.status_code == wanted.status_code, case
    if wanted.status_code == 200:
        return
    error = got.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, case
    assert isinstance(error["code"], str), case
    if name != "unknown model":  # which the gateway itself finds
        assert error["message"] == wanted.json()["error"]["message"], case


def test_a_placeholders_token_ids_end_no_engine(system: System, monolith: Server) -> None:
    """The gateway knows placeholders as text alone; without media their ids are tokens like others."""
    tokens = answer_of(post(monolith, "/tokenize", {"prompt": "a <|image_pad|><|vision_start|> b"}))["tokens"]
    body = GREEDY | {"prompt": tokens}
    got, wanted = (answer_of(post(server, "/v1/completions", body)) for server in (system, monolith))
    assert alike(got, wanted), f"got {got}\nwanted {wanted}"
    assert system.ask("read the digits").token_ids == monolith.ask("read the digits").token_ids


def test_what_the_model_does_not_serve_has_vllms_status(system: System, monolith: Server) -> None:
    for endpoint in FORWARDED:
        if endpoint.kind is not EndpointKind.POOL:
            continue
        body = dict.fromkeys(endpoint.inputs, "a")
        got, wanted = (post(server, endpoint.path, body) for server in (system, monolith))
        assert (got.status_code, wanted.status_code) == (404, 404), endpoint.path
        assert got.json()["error"]["code"] == "endpoint_not_served", endpoint.path
