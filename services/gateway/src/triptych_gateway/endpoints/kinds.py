"""Kinds of values that fields hold, in JSON Schema, with their bounds; `fields` assigns them to fields.

vLLM checks kinds too, but its unions try every member at every element: 385 kB of a wrong kind became 693,001
error objects. So kinds and numbers are bounded here before vLLM sees them.
"""

from collections.abc import Mapping
from typing import Any

from triptych_gateway.endpoints.endpoint import Schema

# The tables of vLLM's GPU runner (`vllm/v1/worker/gpu/sample`, `vllm/envs.py`): it raises beyond them, inside
# the engine. tests/unit/prefill_decode/test_request_guards.py compares them with vLLM's constants.
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_LOGIT_BIAS_TOKENS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256  # 1,024 tokens of all words together: counted by prefill_decode, which tokenizes
MAX_STOPS, MAX_STOP_CHARS = 16, 1024  # an answer is searched for each; the longest holds a stream back
MAX_ID_CHARS = 20  # of a token id that is a key
MAX_TEMPLATE_OPTIONS, MAX_TEMPLATE_OPTION_CHARS = 32, 1024
MAX_TOOLS = 512


def of_kind(kind: Schema, names: str) -> dict[str, Schema]:
    """Return fields of one kind, by `names` with spaces between them."""
    return dict.fromkeys(names.split(), kind)


def objects(properties: Mapping[str, Schema], *required: str) -> Schema:
    """Return the schema of an object."""
    return {"type": "object", "properties": properties} | ({"required": [*required]} if required else {})


def or_null(schema: Schema) -> Schema:
    """Return `schema` with null as another value."""
    return {**schema, "type": [schema["type"], "null"]}


def lists(items: Schema, max_items: int | None = None) -> Schema:
    """Return the schema of a list, which may be bounded."""
    bound: dict[str, Any] = {} if max_items is None else {"maxItems": max_items}
    return {"type": "array", "items": items, **bound}


TRUTH: Schema = {"type": "boolean"}
WHOLE: Schema = {"type": "integer"}
TEXT: Schema = {"type": "string"}
ANY_OBJECT: Schema = {"type": "object"}
BOOLEAN, INTEGER, STRING, OBJECT = or_null(TRUTH), or_null(WHOLE), or_null(TEXT), or_null(ANY_OBJECT)
NUMBER: Schema = {"type": ["number", "null"]}
STRINGS = or_null(lists(TEXT))
FORMAT: Schema = {"type": ["string", "object", "null"]}
STOP: Schema = {
    **lists({**TEXT, "maxLength": MAX_STOP_CHARS}, MAX_STOPS),
    "type": ["string", "array", "null"],
    "maxLength": MAX_STOP_CHARS,
}
STOP_SEQUENCES: Schema = {**STOP, "type": ["array", "null"]}
LOGIT_BIAS: Schema = {
    **OBJECT,
    "additionalProperties": {"type": "number"},
    "propertyNames": {"maxLength": MAX_ID_CHARS},
    "maxProperties": MAX_LOGIT_BIAS_TOKENS,
}
XARGS: Schema = {
    **OBJECT,
    "additionalProperties": {
        **lists({"type": ["string", "number"]}, 1024),
        "type": ["string", "number", "array"],
    },
    "maxProperties": 64,
}
TEMPLATE_OPTIONS: Schema = {
    **OBJECT,
    "description": "values that the model's template reads",
    "additionalProperties": {
        "type": ["string", "number", "boolean", "null"],
        "maxLength": MAX_TEMPLATE_OPTION_CHARS,
    },
    "propertyNames": {"maxLength": 64},
    "maxProperties": MAX_TEMPLATE_OPTIONS,
}
# Their cost is another matter than their kinds: structured outputs are bounded where they are compiled.
STRUCTURED = or_null(
    objects(
        of_kind(STRING, "regex grammar whitespace_pattern")
        | of_kind(BOOLEAN, "json_object disable_any_whitespace disable_additional_properties")
        | of_kind(FORMAT, "json structural_tag")
        | {"choice": STRINGS}
    )
)
_JSON_SCHEMA = objects(
    {"name": TEXT, "description": STRING, "schema": OBJECT, "json_schema": OBJECT, "strict": BOOLEAN}
)
RESPONSE_FORMAT = or_null(
    objects(
        {
            "type": TEXT,
            "json_schema": or_null(_JSON_SCHEMA),
            "structures": or_null(lists(objects({"begin": TEXT, "end": TEXT, "schema": OBJECT}), 256)),
            "triggers": {**STRINGS, "maxItems": 256},
        }
    )
)
STREAM_OPTIONS = or_null(objects(of_kind(BOOLEAN, "include_usage continuous_usage_stats")))
REPETITION = or_null(objects(of_kind(INTEGER, "max_pattern_size min_pattern_size min_count")))
_FUNCTION = objects(
    {"name": TEXT, "description": STRING, "parameters": OBJECT, "strict": BOOLEAN, "defer_loading": BOOLEAN},
    "name",
)
_TOOL = objects(
    {"type": {**TEXT, "enum": ["function"]}, "function": _FUNCTION, "defer_loading": BOOLEAN}, "function"
)
TOOLS = or_null(lists(_TOOL, MAX_TOOLS))
TOOL_CHOICE: Schema = {
    "type": ["string", "object", "null"],
    "properties": {
        "type": TEXT,
        "name": STRING,
        "function": or_null(objects({"name": TEXT})),
        "disable_parallel_tool_use": BOOLEAN,
        "mode": STRING,
        "tools": or_null(lists(ANY_OBJECT, MAX_TOOLS)),
    },
}
_CALL = or_null(objects({"name": STRING, "arguments": FORMAT}))
TOKEN_IDS = lists({**WHOLE, "minimum": 0})
TEXTS: Schema = {
    "description": "text, token ids, or a list of either",
    "anyOf": [TEXT, lists(TEXT), TOKEN_IDS, lists(TOKEN_IDS)],
}
_MESSAGE = objects(
    {
        "role": TEXT,
        "content": {"anyOf": [TEXT, lists(ANY_OBJECT), {"type": "null"}]},
        "name": TEXT,
        **of_kind(STRING, "tool_call_id refusal reasoning reasoning_content"),
        "audio": or_null(objects({"id": TEXT}, "id")),
        "function_call": _CALL,
        "tool_calls": or_null(lists(objects({"id": STRING, "type": STRING, "function": _CALL}))),
        "tools": TOOLS,
    },
    "role",
)
MESSAGES = lists(_MESSAGE)
MESSAGES_OR_CHATS: Schema = {
    "type": ["array", "string", "null"],
    "items": {**_MESSAGE, "type": ["object", "array"], "items": _MESSAGE},
}
SCORED: Schema = {
    "description": "text, or an object whose `content` is a list of text parts; or a list of these",
    "anyOf": [TEXT, ANY_OBJECT, lists({"type": ["string", "object"]})],
}
STREAM: Schema = {
    "type": ["boolean", "integer", "string", "null"],  # `AnyBody` reads 0 and "false" as vLLM does
    "description": "answer by server-sent events",
}

SAMPLED: Mapping[str, Schema] = {
    **of_kind(NUMBER, "temperature top_p min_p presence_penalty frequency_penalty repetition_penalty"),
    **of_kind(INTEGER, "top_k seed"),
    "stop": STOP,
    "stop_token_ids": or_null(lists(WHOLE, MAX_STOP_TOKEN_IDS)),
    "logit_bias": LOGIT_BIAS,
    **of_kind(BOOLEAN, "ignore_eos include_stop_str_in_output skip_special_tokens watermarking"),
    "structured_outputs": STRUCTURED,
    "priority": WHOLE,
    **of_kind(STRING, "user session_id request_id"),
    "vllm_xargs": XARGS,
}
