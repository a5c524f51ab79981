"""Fields of a response that are passed on: its items and tools, each by its type.

vLLM makes some 240 error objects of an item that is none of its 34 kinds, so each is held to one of six here,
which are those that vLLM makes a chat of.
"""

from collections.abc import Mapping

from triptych_gateway.endpoints.endpoint import Schema
from triptych_gateway.endpoints.kinds import (
    BOOLEAN,
    INTEGER,
    MAX_TOOLS,
    OBJECT,
    SAMPLED,
    STREAM,
    STRING,
    STRINGS,
    TEMPLATE_OPTIONS,
    TOOL_CHOICE,
)

_STATUSES = ["in_progress", "completed", "incomplete"]
_STATUS_OR_NULL: Schema = {"type": ["string", "null"], "enum": [*_STATUSES, None]}
_TEXT: Schema = {"type": "string"}
_LOGPROB: Mapping[str, Schema] = {
    "token": _TEXT,
    "logprob": {"type": "number"},
    "bytes": {"type": "array", "items": {"type": "integer"}, "maxItems": 64},
}
_PART: Schema = {
    "type": "object",
    "properties": {
        "type": _TEXT,
        "text": _TEXT,
        "refusal": _TEXT,
        # Of an answer that is sent again, and read by nothing: vLLM's unions would try each as nine kinds.
        "annotations": {"type": "array", "maxItems": 0},
        "logprobs": {
            "type": ["array", "null"],
            "items": {
                "type": "object",
                "properties": {
                    **_LOGPROB,
                    "top_logprobs": {
                        "type": "array",
                        "maxItems": 32,
                        "items": {
                            "type": "object",
                            "properties": _LOGPROB,
                            "required": ["token", "logprob"],
                        },
                    },
                },
                "required": ["token", "logprob"],
            },
        },
        "prompt_cache_breakpoint": {
            "type": "object",
            "properties": {"mode": {"type": "string", "enum": ["explicit"]}},
            "required": ["mode"],
        },
    },
}
_PARTS: Schema = {"type": ["string", "array"], "items": _PART}


def _kind(kind: str, /, required: tuple[str, ...], **properties: Schema) -> Schema:
    """Return the schema of an object of type `kind`; required fields without a property are text."""
    return {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": [kind]},
            **dict.fromkeys(required, _TEXT),
            **properties,
        },
        "required": list(required),
    }


def _texts(kind: str) -> Schema:
    return {"type": ["array", "null"], "items": _kind(kind, ("text",))}


_ITEM: Schema = {
    "type": "object",
    "discriminator": {"propertyName": "type"},
    "oneOf": [
        _kind(
            "message",
            ("role", "content"),
            role={"type": "string", "enum": ["user", "assistant", "system", "developer"]},
            content=_PARTS,
            id=_TEXT,
            status={"type": "string", "enum": _STATUSES},
            phase={"type": ["string", "null"], "enum": ["commentary", "final_answer", None]},
        ),
        _kind(
            "function_call",
            ("call_id", "name", "arguments"),
            id=STRING,
            namespace=STRING,
            status=_STATUS_OR_NULL,
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
        _kind("custom_tool_call_output", ("call_id", "output"), output=_PARTS, id=_TEXT, status=STRING),
        _kind(
            "reasoning",
            ("summary",),
            summary={**_texts("summary_text"), "type": "array"},
            content=_texts("reasoning_text"),
            id=_TEXT,
            encrypted_content=STRING,
            status=_STATUS_OR_NULL,
        ),
    ],
}
ITEM_TYPES = tuple(kind["properties"]["type"]["enum"][0] for kind in _ITEM["oneOf"])
_FUNCTION_TOOL = _kind(
    "function", ("name",), description=STRING, parameters=OBJECT, strict=BOOLEAN, defer_loading=BOOLEAN
)
_CUSTOM_TOOL = _kind(
    "custom",
    ("name",),
    description={"type": "string"},
    format={
        "type": ["object", "null"],
        "properties": {"type": {"type": "string", "enum": ["text", "grammar"]}, "syntax": _TEXT},
        "required": ["type"],
    },
    defer_loading=BOOLEAN,
)


def _tools(*kinds: Schema) -> Schema:
    return {
        "type": ["array", "null"],
        "maxItems": MAX_TOOLS,
        "items": {"type": "object", "discriminator": {"propertyName": "type"}, "oneOf": [*kinds]},
    }


_TOOLS_OF_SPACE: Schema = {**_tools(_FUNCTION_TOOL, _CUSTOM_TOOL), "type": "array"}
_RESPONSE_TOOLS = _tools(
    _FUNCTION_TOOL,
    _CUSTOM_TOOL,
    _kind("namespace", ("name", "description", "tools"), tools=_TOOLS_OF_SPACE),
)
RESPONSE: Mapping[str, Schema] = {
    **SAMPLED,
    "input": {
        "description": "text, or a list of items: messages, calls of tools and their outputs",
        "type": ["string", "array"],
        "items": _ITEM,
    },
    "instructions": STRING,
    "stream": STREAM,
    "store": {"type": ["boolean", "null"], "description": "where the instance keeps responses"},
    "background": BOOLEAN,
    "previous_response_id": STRING,
    "max_output_tokens": INTEGER,
    "max_tool_calls": INTEGER,
    "include": {**STRINGS, "maxItems": 32},
    "top_logprobs": INTEGER,
    "text": {
        "type": ["object", "null"],
        "description": "`format`: text, json_object or json_schema",
        "properties": {
            "verbosity": STRING,
            "format": {
                "type": ["object", "null"],
                "properties": {
                    "type": {"type": "string"},
                    "name": STRING,
                    "description": STRING,
                    "schema": OBJECT,
                    "strict": BOOLEAN,
                },
            },
        },
    },
    "tools": _RESPONSE_TOOLS,
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": BOOLEAN,
    "reasoning": {
        "type": ["object", "null"],
        "properties": dict.fromkeys(("effort", "summary", "generate_summary", "context", "mode"), STRING),
    },
    "include_reasoning": BOOLEAN,
    "truncation": {"type": ["string", "null"], "description": "auto or disabled"},
    "metadata": {
        "type": ["object", "null"],
        "additionalProperties": {"type": "string"},
        "maxProperties": 64,
    },
    "service_tier": STRING,
    "prompt": OBJECT,
    "prompt_cache_key": STRING,
    # vLLM 0.33 returns these three in the response and does nothing else with them.
    "prompt_cache_options": {
        "type": ["object", "null"],
        "properties": {
            **dict.fromkeys(("mode", "ttl", "comparison_response_id"), STRING),
            "prewarm": BOOLEAN,
        },
    },
    "prompt_cache_retention": STRING,
    "safety_identifier": STRING,
    "spaces_between_special_tokens": BOOLEAN,
    "chat_template_kwargs": TEMPLATE_OPTIONS,
    "mm_processor_kwargs": OBJECT,
    "media_io_kwargs": OBJECT,
    "enable_response_messages": BOOLEAN,
}
