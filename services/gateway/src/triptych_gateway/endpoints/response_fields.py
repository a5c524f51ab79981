"""Fields of a response that are passed on: its items and tools, each by its type.

vLLM makes some 240 error objects of an item that is none of its 34 kinds, so each is held to one of six here,
which are those that vLLM makes a chat of.
"""

from collections.abc import Mapping

from triptych_gateway.endpoints.endpoint import Schema
from triptych_gateway.endpoints.kinds import (
    ANY_OBJECT,
    BOOLEAN,
    INTEGER,
    MAX_TOOLS,
    OBJECT,
    SAMPLED,
    STREAM,
    STRING,
    STRINGS,
    TEMPLATE_OPTIONS,
    TEXT,
    TOOL_CHOICE,
    WHOLE,
    lists,
    objects,
    of_kind,
    or_null,
)

_STATUSES = ["in_progress", "completed", "incomplete"]
_STATUS_OR_NULL: Schema = {**STRING, "enum": [*_STATUSES, None]}
_LOGPROB: Mapping[str, Schema] = {"token": TEXT, "logprob": {"type": "number"}, "bytes": lists(WHOLE, 64)}
_PART = objects(
    {
        **of_kind(TEXT, "type text refusal"),
        # Of an answer that is sent again, and read by nothing: vLLM's unions would try each as nine kinds.
        "annotations": {"type": "array", "maxItems": 0},
        "logprobs": or_null(
            lists(
                objects(
                    {**_LOGPROB, "top_logprobs": lists(objects(_LOGPROB, "token", "logprob"), 32)},
                    "token",
                    "logprob",
                )
            )
        ),
        "prompt_cache_breakpoint": objects({"mode": {**TEXT, "enum": ["explicit"]}}, "mode"),
    }
)
_PARTS: Schema = {"type": ["string", "array"], "items": _PART}


def _kind(kind: str, /, required: tuple[str, ...], **properties: Schema) -> Schema:
    """Return the schema of an object of type `kind`; required fields without a property are text."""
    texts = dict.fromkeys(required, TEXT)
    return objects({"type": {**TEXT, "enum": [kind]}, **texts, **properties}, *required)


def _any_kind(*kinds: Schema) -> Schema:
    """Return the schema of an object that is one of `kinds`, by its type."""
    return {**ANY_OBJECT, "discriminator": {"propertyName": "type"}, "oneOf": [*kinds]}


_ITEM = _any_kind(
    _kind(
        "message",
        ("role", "content"),
        role={**TEXT, "enum": ["user", "assistant", "system", "developer"]},
        content=_PARTS,
        id=TEXT,
        status={**TEXT, "enum": _STATUSES},
        phase={**STRING, "enum": ["commentary", "final_answer", None]},
    ),
    _kind(
        "function_call", ("call_id", "name", "arguments"), id=STRING, namespace=STRING, status=_STATUS_OR_NULL
    ),
    _kind("custom_tool_call", ("call_id", "name", "input"), id=STRING, namespace=STRING, status=STRING),
    _kind(
        "function_call_output",
        ("call_id", "output"),
        output=_PARTS,
        id=STRING,
        name=STRING,
        status=_STATUS_OR_NULL,
    ),
    _kind("custom_tool_call_output", ("call_id", "output"), output=_PARTS, id=TEXT, status=STRING),
    _kind(
        "reasoning",
        ("summary",),
        summary=lists(_kind("summary_text", ("text",))),
        content=or_null(lists(_kind("reasoning_text", ("text",)))),
        id=TEXT,
        encrypted_content=STRING,
        status=_STATUS_OR_NULL,
    ),
)
ITEM_TYPES = tuple(kind["properties"]["type"]["enum"][0] for kind in _ITEM["oneOf"])
_FUNCTION_TOOL = _kind(
    "function", ("name",), description=STRING, parameters=OBJECT, strict=BOOLEAN, defer_loading=BOOLEAN
)
_CUSTOM_TOOL = _kind(
    "custom",
    ("name",),
    description=TEXT,
    format=or_null(objects({"type": {**TEXT, "enum": ["text", "grammar"]}, "syntax": TEXT}, "type")),
    defer_loading=BOOLEAN,
)
_TOOLS_OF_SPACE = lists(_any_kind(_FUNCTION_TOOL, _CUSTOM_TOOL), MAX_TOOLS)
_SPACE = _kind("namespace", ("name", "description", "tools"), tools=_TOOLS_OF_SPACE)
_TEXT_FORMAT = {"type": TEXT, "name": STRING, "description": STRING, "schema": OBJECT, "strict": BOOLEAN}
RESPONSE: Mapping[str, Schema] = {
    **SAMPLED,
    "input": {
        "description": "text, or a list of items: messages, calls of tools and their outputs",
        "type": ["string", "array"],
        "items": _ITEM,
    },
    "stream": STREAM,
    "store": {**BOOLEAN, "description": "where the instance keeps responses"},
    **of_kind(INTEGER, "max_output_tokens max_tool_calls top_logprobs"),
    "include": {**STRINGS, "maxItems": 32},
    "text": {
        **or_null(objects({"verbosity": STRING, "format": or_null(objects(_TEXT_FORMAT))})),
        "description": "`format`: text, json_object or json_schema",
    },
    "tools": or_null(lists(_any_kind(_FUNCTION_TOOL, _CUSTOM_TOOL, _SPACE), MAX_TOOLS)),
    "tool_choice": TOOL_CHOICE,
    **of_kind(
        BOOLEAN,
        "background parallel_tool_calls include_reasoning spaces_between_special_tokens"
        " enable_response_messages",
    ),
    "reasoning": or_null(objects(of_kind(STRING, "effort summary generate_summary context mode"))),
    "truncation": {**STRING, "description": "auto or disabled"},
    "metadata": {**OBJECT, "additionalProperties": TEXT, "maxProperties": 64},
    # vLLM 0.33 returns `prompt_cache_...` and `safety_identifier` in the response, and does nothing else.
    **of_kind(
        STRING,
        "instructions previous_response_id service_tier prompt_cache_key prompt_cache_retention"
        " safety_identifier",
    ),
    "prompt_cache_options": or_null(
        objects({**of_kind(STRING, "mode ttl comparison_response_id"), "prewarm": BOOLEAN})
    ),
    **of_kind(OBJECT, "prompt mm_processor_kwargs media_io_kwargs"),
    "chat_template_kwargs": TEMPLATE_OPTIONS,
}
