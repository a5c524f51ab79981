"""Grammars that end a process or take minutes, on real engines: 400 for their callers, nothing for others."""

import concurrent.futures
import json
from typing import Any

import httpx
import pytest

from tests.support.real.joining import records_of
from tests.support.real.processes import Part, pids_of
from tests.support.real.system import MODEL, System
from tests.support.vllm_connector.grammars import NESTED, schema

pytestmark = pytest.mark.engine

PREFILL_DECODE = "prefill_decode-0"
LIMIT_S = 120.0
POISON = {"type": "string", "pattern": NESTED}
ENDLESS = json.loads(schema(9000).text)
MULTIPLES = {"type": "integer", "multipleOf": 3}  # vLLM's first choice for this was another backend, for all


def ask(url: str, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    body = {
        "model": MODEL.name, "temperature": 0, "max_tokens": 24,
        "messages": [{"role": "user", "content": "read the digits"}], **fields,
    }  # fmt: skip
    return httpx.post(f"{url}{path}", json=body, timeout=LIMIT_S, trust_env=False)


def response_format(json_schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": json_schema}}


def test_a_hostile_grammar_ends_no_process_and_keeps_nobody_waiting(system: System) -> None:
    gateway = system.base_url.removesuffix("/v1")
    instance = str(records_of(system)[PREFILL_DECODE].url)
    before = pids_of(system, PREFILL_DECODE, Part.HOST)

    refused = ask(gateway, response_format=response_format(POISON))
    assert refused.status_code == 400, refused.text[:500]
    assert refused.json()["error"]["param"] == "response_format"
    assert refused.json()["error"]["code"] == "grammar_too_complex"

    # What no gateway has looked at.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        hostile = {
            "poison": pool.submit(ask, instance, response_format=response_format(POISON)),
            "endless": pool.submit(ask, instance, structured_outputs={"json": ENDLESS}),
            "another backend": pool.submit(ask, gateway, response_format=response_format(MULTIPLES)),
        }
        num_beside = 0
        while num_beside == 0 or not hostile["endless"].done():
            neighbour = ask(gateway, response_format={"type": "json_object"})
            assert neighbour.status_code == 200, neighbour.text[:500]
            assert neighbour.json()["choices"][0]["message"]["content"].lstrip().startswith("{")
            num_beside += not hostile["endless"].done()
        answers = {name: each.result() for name, each in hostile.items()}
    for name, answer in answers.items():
        assert answer.status_code == 400, f"{name}: {answer.text[:500]}"
    for name in ("poison", "endless"):
        assert "structured_outputs.json is too complex" in answers[name].text, answers[name].text[:500]
        assert answers[name].json()["error"]["param"] == "structured_outputs"

    choice = ask(gateway, structured_outputs={"choice": ["one two", "three"]})
    assert choice.json()["choices"][0]["message"]["content"] in ("one two", "three"), choice.text[:500]
    assert pids_of(system, PREFILL_DECODE, Part.HOST) == before


def test_a_stream_whose_grammar_is_refused_has_no_text(system: System) -> None:
    instance = str(records_of(system)[PREFILL_DECODE].url)
    answer = ask(instance, response_format=response_format(POISON), stream=True)
    assert "too complex" in answer.text, answer.text[:500]
    assert '"content"' not in answer.text
