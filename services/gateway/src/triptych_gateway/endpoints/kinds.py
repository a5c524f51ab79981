"""Kinds of values that fields hold, in JSON Schema, with their bounds; `fields` assigns them to fields.

vLLM checks kinds too, but its unions try every member at every element: 385 kB of a wrong kind became 693,001
error objects. So kinds and numbers are bounded here before vLLM sees them.
"""

from collections.abc import Mapping

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

BOOLEAN: Schema = {"type": ["boolean", "null"]}
INTEGER: Schema = {"type": ["integer", "null"]}
NUMBER: Schema = {"type": ["number", "null"]}
STRING: Schema = {"type": ["string", "null"]}
OBJECT: Schema = {"type": ["object", "null"]}
STRINGS: Schema = {"type": ["array", "null"], "items": {"type": "string"}}
FORMAT: Schema = {"type": ["string", "object", "null"]}
STOP: Schema = {
    "type": ["string", "array", "null"],
    "items": {"type": "string", "maxLength": MAX_STOP_CHARS},
    "maxItems": MAX_STOPS,
    "maxLength": MAX_STOP_CHARS,
}
STOP_SEQUENCES: Schema = {**STOP, "type": ["array", "null"]}
LOGIT_BIAS: Schema = {
    "type": ["object", "null"],
    "additionalProperties": {"type": "number"},
    "propertyNames": {"maxLength": MAX_ID_CHARS},
    "maxProperties": MAX_LOGIT_BIAS_TOKENS,
}
XARGS: Schema = {
    "type": ["object", "null"],
    "additionalProperties": {
        "type": ["string", "number", "array"],
        "items": {"type": ["string", "number"]},
        "maxItems": 1024,
    },
    "maxProperties": 64,
}
TEMPLATE_OPTIONS: Schema = {
    "type": ["object", "null"],
    "description": "values that the model's template reads",
    "additionalProperties": {
        "type": ["string", "number", "boolean", "null"],
        "maxLength": MAX_TEMPLATE_OPTION_CHARS,
    },
    "propertyNames": {"maxLength": 64},
    "maxProperties": MAX_TEMPLATE_OPTIONS,
}
# Their cost is another matter than their kinds: structured outputs are bounded where they are compiled.
STRUCTURED: Schema = {
    "type": ["object", "null"],
    "properties": {
        "regex": STRING,
        "choice": STRINGS,
        "grammar": STRING,
        "json_object": BOOLEAN,
        "json": FORMAT,
        "structural_tag": FORMAT,
        "disable_any_whitespace": BOOLEAN,
        "disable_additional_properties": BOOLEAN,
        "whitespace_pattern": STRING,
    },
}
RESPONSE_FORMAT: Schema = {
    "type": ["object", "null"],
    "properties": {
        "type": {"type": "string"},
        "json_schema": {
            "type": ["object", "null"],
            "properties": {
                "name": {"type": "string"},
                "description": STRING,
                "schema": OBJECT,
                "json_schema": OBJECT,
                "strict": BOOLEAN,
            },
        },
        "structures": {
            "type": ["array", "null"],
            "maxItems": 256,
            "items": {
                "type": "object",
                "properties": {"begin": {"type": "string"}, "end": {"type": "string"}, "schema": OBJECT},
            },
        },
        "triggers": {**STRINGS, "maxItems": 256},
    },
}
STREAM_OPTIONS: Schema = {
    "type": ["object", "null"],
    "properties": {"include_usage": BOOLEAN, "continuous_usage_stats": BOOLEAN},
}
REPETITION: Schema = {
    "type": ["object", "null"],
    "properties": dict.fromkeys(("max_pattern_size", "min_pattern_size", "min_count"), INTEGER),
}
_FUNCTION: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "description": STRING,
        "parameters": OBJECT,
        "strict": BOOLEAN,
        "defer_loading": BOOLEAN,
    },
    "required": ["name"],
}
TOOLS: Schema = {
    "type": ["array", "null"],
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["function"]},
            "function": _FUNCTION,
            "defer_loading": BOOLEAN,
        },
        "required": ["function"],
    },
}
TOOL_CHOICE: Schema = {
    "type": ["string", "object", "null"],
    "properties": {
        "type": {"type": "string"},
        "name": STRING,
        "function": {"type": ["object", "null"], "properties": {"name": {"type": "string"}}},
        "disable_parallel_tool_use": BOOLEAN,
        "mode": STRING,
        "tools": {"type": ["array", "null"], "items": {"type": "object"}, "maxItems": MAX_TOOLS},
    },
}
_CALL: Schema = {
    "type": ["object", "null"],
    "properties": {"name": STRING, "arguments": {"type": ["string", "object", "null"]}},
}
TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
TEXTS: Schema = {
    "description": "text, token ids, or a list of either",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        TOKEN_IDS,
        {"type": "array", "items": TOKEN_IDS},
    ],
}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"type": "string"},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "object"}},
                {"type": "null"},
            ]
        },
        "name": {"type": "string"},
        "tool_call_id": STRING,
        "refusal": STRING,
        "reasoning": STRING,
        "reasoning_content": STRING,
        "audio": {"type": ["object", "null"], "properties": {"id": {"type": "string"}}, "required": ["id"]},
        "function_call": _CALL,
        "tool_calls": {
            "type": ["array", "null"],
            "items": {
                "type": "object",
                "properties": {"id": STRING, "type": STRING, "function": _CALL},
            },
        },
        "tools": TOOLS,
    },
    "required": ["role"],
}
MESSAGES: Schema = {"type": "array", "items": _MESSAGE}
MESSAGES_OR_CHATS: Schema = {
    "type": ["array", "string", "null"],
    "items": {**_MESSAGE, "type": ["object", "array"], "items": _MESSAGE},
}
SCORED: Schema = {
    "description": "text, or an object whose `content` is a list of text parts; or a list of these",
    "anyOf": [
        {"type": "string"},
        {"type": "object"},
        {"type": "array", "items": {"type": ["string", "object"]}},
    ],
}
STREAM: Schema = {
    "type": ["boolean", "integer", "string", "null"],  # `bodies` reads 0 and "false" as vLLM does
    "description": "answer by server-sent events",
}

SAMPLED: Mapping[str, Schema] = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INTEGER,
    "min_p": NUMBER,
    "seed": INTEGER,
    "stop": STOP,
    "stop_token_ids": {
        "type": ["array", "null"],
        "items": {"type": "integer"},
        "maxItems": MAX_STOP_TOKEN_IDS,
    },
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "logit_bias": LOGIT_BIAS,
    "ignore_eos": BOOLEAN,
    "include_stop_str_in_output": BOOLEAN,
    "skip_special_tokens": BOOLEAN,
    "watermarking": BOOLEAN,
    "structured_outputs": STRUCTURED,
    "priority": {"type": "integer"},
    "user": STRING,
    "session_id": STRING,
    "request_id": STRING,
    "vllm_xargs": XARGS,
}
