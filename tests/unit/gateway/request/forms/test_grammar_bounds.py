"""Structured outputs that are known to cost minutes, or a process, are refused with the field's name."""

import json
import time
from typing import Any

import pytest

from triptych_common.domain.errors import RequestError
from triptych_gateway.endpoints.table import CHAT, CREATE_RESPONSE, FORWARDED, MESSAGES
from triptych_gateway.request.chat_request import RequestOptions, parse_chat_request
from triptych_gateway.request.forms.grammar_bounds import GrammarBounds, check_grammars, named_as_sent
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard
from triptych_gateway.request.text_request import parse_text_request
from triptych_gateway.settings import RequestSettings

NESTED = "(" * 50_000 + "a" + ")" * 50_000
POISON = {"type": "string", "pattern": "(" * 1000 + "a" + ")" * 1000}
GUARD = PlaceholderGuard(())


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


DEFAULT = GrammarBounds()


def refusal(bounds: GrammarBounds = DEFAULT, **fields: Any) -> RequestError | None:
    try:
        check_grammars(fields, bounds)
    except RequestError as error:
        return error
    return None


FIELDS: dict[str, dict[str, Any]] = {
    "structured_outputs.json": {"structured_outputs": {"json": POISON}},
    "structured_outputs.regex": {"structured_outputs": {"regex": NESTED}},
    "structured_outputs.choice": {"structured_outputs": {"choice": ["a"] * 10_001}},
    "structured_outputs.grammar": {"structured_outputs": {"grammar": f"root ::= {NESTED[49_800:50_200]}"}},
    "structured_outputs.structural_tag": {
        "structured_outputs": {"structural_tag": json.dumps({"structures": [{"schema": POISON}]})}
    },
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"schema": POISON}}},
    "text.format": {"text": {"format": {"type": "json_schema", "schema": POISON}}},
    "output_config.format": {"output_config": {"format": {"type": "json_schema", "schema": POISON}}},
    "tools[1].function.parameters": {
        "tools": [{}, {"type": "function", "function": {"name": "f", "strict": True, "parameters": POISON}}],
        "tool_choice": "required",
    },
    "tools[0].parameters": {"tools": [{"type": "function", "name": "f", "parameters": POISON}]},
    "tools[0].input_schema": {"tools": [{"name": "f", "input_schema": POISON}]},
    "tools[0].format": {"tools": [{"type": "custom", "format": {"definition": NESTED[49_800:50_200]}}]},
}  # fmt: skip


@pytest.mark.parametrize("param", FIELDS)
def test_every_field_that_becomes_a_grammar_is_bounded(param: str) -> None:
    error = refusal(**FIELDS[param])
    assert error is not None
    assert (error.status_code, error.code, error.param) == (400, "grammar_too_complex", param)


@pytest.mark.parametrize(
    "schema",
    [
        nested(81),
        {"pattern": NESTED},
        {"patternProperties": {"(" * 100 + ")" * 100: {}}},
        {"pattern": "((a{1000}){100}b){11}"},
        {"type": "array", "maxItems": 10_000, "items": {"type": "string", "maxLength": 101}},
        {"type": "array", "maxItems": 10_000, "items": {"type": "string", "pattern": "[a-z]{101}"}},
        {"type": "string", "maxLength": 10**30},
        {"pattern": "a{" + "9" * 50 + "}"},
        {"enum": [str(number) for number in range(10_001)]},
        {"anyOf": [{"enum": [1, 2]}] * 5000},
        {"pattern": "a|" * 10_001},
        {"properties": {"x" * 70_000: {}}},
        {"description": "x" * 70_000},
        json.dumps({"pattern": POISON["pattern"]}),
        "{",
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_what_is_beyond_a_bound_is_refused(schema: Any) -> None:
    error = refusal(structured_outputs={"json": schema})
    assert error is not None
    assert error.param == "structured_outputs.json"
    assert len(error.message) < 200


@pytest.mark.parametrize(
    "fields",
    [
        {"json": nested(60)},
        {"json": {"type": "array", "maxItems": 100, "items": {"type": "string", "maxLength": 2000}}},
        {"json": {"properties": {"pattern": {"type": "string"}, "enum": {"enum": ["a"]}, "maxItems": {}}}},
        {"json": json.dumps({"type": "integer"})},
        {"json": {"enum": [f"label {number}" for number in range(2000)]}},
        {"regex": r"\([(]{3}[^]()]\){2,5}|(a|b)*c+?"},
        {"regex": ""},
        {"choice": ["yes", "no"]},
        {"grammar": 'root ::= "(((((" x # ((((\nx ::= [a-z]{1,20} ("," x)*\n' + '# ((((("\n' * 100},
        {"json_object": True},
        {},
        {"json": 5, "regex": 5, "choice": 5},  # which vLLM refuses
    ],
    ids=str,
)
def test_ordinary_ones_pass(fields: dict[str, Any]) -> None:
    assert refusal(structured_outputs=fields) is None


def test_values_of_the_wrong_type_are_left_to_vllm() -> None:
    names = ("structured_outputs", "response_format", "text", "output_config", "tools")
    values: tuple[Any, ...] = (None, 1, "x", [], [1], {})
    for value in values:
        assert refusal(**dict.fromkeys(names, value)) is None


@pytest.mark.parametrize(
    "text", ["(", "[", "{1", '"', '\\"', '"\\"', "{1,1", "a{9", "#", "\\", "[]", "()"], ids=repr
)
def test_reading_is_linear(text: str) -> None:
    """Compared with a quarter of the text, in CPU time of this thread."""

    def cost(num_chars: int) -> float:
        long = (text * num_chars)[:num_chars]
        bounds = GrammarBounds(1 << 30, 1 << 60, 1 << 60)
        started = time.thread_time()
        for field in ("regex", "grammar"):
            refusal(bounds, structured_outputs={field: long})
        return time.thread_time() - started

    cost(1000)
    small = min(cost(20_000) for _ in range(3))
    large = min(cost(80_000) for _ in range(3))
    assert large < 10 * small + 0.01, (small, large)


@pytest.mark.parametrize("endpoint", [CHAT, MESSAGES, CREATE_RESPONSE], ids=lambda each: each.path)
def test_chats_are_checked_before_anything_is_asked(endpoint: Any) -> None:
    body = {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "input": "hi",
        "tools": [{"type": "function", "name": "f", "parameters": POISON, "input_schema": POISON}],
    }  # fmt: skip
    with pytest.raises(RequestError, match="parentheses") as caught:
        parse_chat_request(json.dumps(body).encode(), GUARD, 1, endpoint=endpoint)
    assert caught.value.code == "grammar_too_complex"


def test_other_requests_are_checked_too() -> None:
    (completions,) = (each for each in FORWARDED if each.path == "/v1/completions")
    body = {"model": "m", "prompt": "hi", "structured_outputs": {"regex": POISON["pattern"]}}
    with pytest.raises(RequestError, match=r"structured_outputs\.regex has parentheses"):
        parse_text_request(json.dumps(body).encode(), completions, GUARD, RequestSettings(), RequestOptions())


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format"),
        ({"response_format": {"type": "text"}, "tools": [TOOL]}, "tools[0].function.parameters"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({}, "structured_outputs"),
    ],
)  # fmt: skip
def test_an_engines_error_names_the_field_that_the_caller_sent(fields: dict[str, Any], sent: str) -> None:
    engine = (
        "structured_outputs.regex" if sent.startswith("structured_outputs") else "structured_outputs.json"
    )
    error = RequestError(400, "x", f"{engine} is too complex: structured_outputs", "structured_outputs")
    found = named_as_sent(error, fields)
    wanted = engine if not fields else sent
    assert (found.message, found.param) == (f"{wanted} is too complex: structured_outputs", sent)


def test_other_errors_of_an_engine_stay() -> None:
    error = RequestError(400, "x", "structured_outputs.json", "temperature")
    assert named_as_sent(error, {"response_format": {"type": "json_object"}}) is error
