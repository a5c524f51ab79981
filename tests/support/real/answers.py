"""Answers of two servers, compared as JSON: but for ids and times they are to be the same."""

import json
from typing import Any

import httpx
import pytest

from tests.support.real.system import MODEL, Server

OWN = {"id", "created"}  # of each answer


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


def joined_chat(events: list[Any]) -> dict[str, Any]:
    """What a streamed chat says in the end, by choice: how it is cut into events depends on time alone."""
    said: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            known = said.setdefault(
                choice["index"], {"text": "", "reasoning": "", "tokens": [], "logprobs": [], "tools": {}}
            )
            delta = choice["delta"]
            known["text"] += delta.get("content") or ""
            known["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or []:
                tool = known["tools"].setdefault(call["index"], {"name": "", "arguments": ""})
                for name in tool:
                    tool[name] += (call.get("function") or {}).get(name) or ""
            known["tokens"] += choice.get("token_ids") or []
            known["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
            known["end"] = choice.get("finish_reason") or known.get("end")
            known["stop"] = choice.get("stop_reason") or known.get("stop")
    return {"usage": usage, "choices": said}


def without_call_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """vLLM gives each call of a tool an id by chance."""
    for choice in answer["choices"]:
        for call in choice["message"].get("tool_calls") or []:
            call.pop("id")
    return answer
