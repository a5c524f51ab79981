"""Answers of two servers, compared as JSON: but for ids and times they are to be the same."""

from typing import Any

import httpx

from tests.support.real.bodies import comparing
from tests.support.real.system import MODEL, Server


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    url = server.base_url.removesuffix("/v1") + path
    named = {"model": MODEL.name, **body}
    sent = {name: value for name, value in named.items() if name != "model" or value is not None}
    return httpx.post(url, json=sent, timeout=120, trust_env=False)


def answer_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    answer: dict[str, Any] = comparing.shown(response.json())
    return answer


def events_of(response: httpx.Response) -> list[Any]:
    """Of a stream."""
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    return comparing.events_of(response.text)


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
