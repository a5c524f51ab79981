"""Whether two answers are the same, but for ids and times."""

import json
from typing import Any

import pytest

OWN = {"id", "created"}  # of each answer


def alike(one: Any, other: Any) -> bool:
    """The same JSON, with numbers that were computed alike."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, abs=1e-3)
    return bool(one == other)


def shown(answer: Any) -> Any:
    """Without what each answer has of its own."""
    if not isinstance(answer, dict):
        return answer
    kept = {name: value for name, value in answer.items() if name not in OWN}
    fingerprint = kept.get("system_fingerprint")
    if isinstance(fingerprint, str):  # vLLM's version, and a digest of the engine's options
        kept["system_fingerprint"] = fingerprint.rpartition("-")[0]
    return kept


def events_of(stream: str) -> list[Any]:
    """Without `[DONE]`, which ends it."""
    events = [each.removeprefix("data: ") for each in stream.strip().split("\n\n")]
    assert events.pop() == "[DONE]"
    return [shown(json.loads(each)) for each in events]


def joined(events: list[Any]) -> dict[str, Any]:
    """What a stream says in the end: how tokens are grouped into events depends on time alone."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            known = choices.setdefault(choice["index"], {"text": "", "tokens": [], "logprobs": []})
            delta = choice.get("delta") or {}
            known["role"] = delta.get("role") or known.get("role")
            known["text"] += choice.get("text") or delta.get("content") or ""
            known["tokens"] += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            known["logprobs"] += logprobs.get("token_logprobs") or logprobs.get("content") or []
            known["end"] = choice.get("finish_reason") or known.get("end")
            known["stop"] = choice.get("stop_reason") or known.get("stop")
    errors = [event["error"] for event in events if "error" in event]
    names = sorted({name for event in events for name in event})
    return {"usage": usage, "choices": choices, "names": names, "errors": errors}
