"""Fields that the gateway passes on: shown by the API's description, checked by `request.bounds.shapes`."""

from collections.abc import Mapping

from triptych_gateway.endpoints.endpoint import Schema
from triptych_gateway.endpoints.kinds import (
    BOOLEAN,
    INTEGER,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_TOOLS,
    MESSAGES,
    MESSAGES_OR_CHATS,
    NUMBER,
    OBJECT,
    REPETITION,
    RESPONSE_FORMAT,
    SAMPLED,
    SCORED,
    STOP_SEQUENCES,
    STREAM,
    STREAM_OPTIONS,
    STRING,
    STRINGS,
    TEMPLATE_OPTIONS,
    TEXTS,
    TOKEN_IDS,
    TOOL_CHOICE,
    TOOLS,
    XARGS,
)

SAMPLING: Mapping[str, Schema] = {
    **SAMPLED,
    "max_tokens": INTEGER,
    "n": INTEGER,
    "best_of": INTEGER,
    "use_beam_search": BOOLEAN,
    "length_penalty": NUMBER,
    "min_tokens": INTEGER,
    "spaces_between_special_tokens": BOOLEAN,
    "bad_words": {
        "type": ["array", "null"],
        "items": {"type": "string", "maxLength": MAX_BAD_WORD_CHARS},
        "maxItems": MAX_BAD_WORDS,
    },
    "allowed_token_ids": {
        "type": ["array", "null"],
        "items": {"type": "integer"},
        "maxItems": MAX_ALLOWED_TOKEN_IDS,
    },
    "prompt_logprobs": INTEGER,
    "response_format": RESPONSE_FORMAT,
    "repetition_detection": REPETITION,
    "thinking_token_budget": INTEGER,
    "stream_interval": INTEGER,
    "truncate_prompt_tokens": INTEGER,
    "truncation_side": STRING,
    "add_special_tokens": BOOLEAN,
    "echo": BOOLEAN,
    "routed_experts_prompt_start": INTEGER,
    "return_token_ids": BOOLEAN,
    "return_tokens_as_token_ids": BOOLEAN,
    "return_token_offsets": BOOLEAN,
    "return_weight_versions": BOOLEAN,
}
_TEMPLATE: Mapping[str, Schema] = {
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
    "chat_template_kwargs": TEMPLATE_OPTIONS,
    "mm_processor_kwargs": OBJECT,
    "media_io_kwargs": OBJECT,
}
CHAT: Mapping[str, Schema] = {
    **SAMPLING,
    **_TEMPLATE,
    "messages": MESSAGES,
    "stream": STREAM,
    "stream_options": STREAM_OPTIONS,
    "max_completion_tokens": INTEGER,
    "logprobs": BOOLEAN,
    "top_logprobs": INTEGER,
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": BOOLEAN,
    "documents": {
        "type": ["array", "null"],
        "maxItems": 1024,
        "items": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "reasoning_effort": STRING,
    "include_reasoning": BOOLEAN,
    "return_prompt_text": BOOLEAN,
}
_BLOCK: Schema = {
    "type": "object",
    "properties": {
        "type": {"type": "string"},
        **dict.fromkeys(
            ("text", "id", "tool_use_id", "name", "tool_name", "thinking", "signature", "data"), STRING
        ),
        "source": OBJECT,
        "input": OBJECT,
        "content": {"type": ["string", "array", "null"], "items": {"type": "object"}},
        "is_error": BOOLEAN,
        "tool": OBJECT,
    },
}
BLOCKS: Schema = {
    "description": "text, or a list of text blocks",
    "type": ["string", "array", "null"],
    "items": _BLOCK,
}
COUNTED_MESSAGES: Mapping[str, Schema] = {
    "messages": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "role": {"type": "string"},
                "content": {"type": ["string", "array"], "items": _BLOCK},
            },
            "required": ["role"],
        },
    },
    "system": BLOCKS,
    "tools": {
        "type": ["array", "null"],
        "maxItems": MAX_TOOLS,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "description": STRING,
                "input_schema": {"type": "object"},
                "strict": BOOLEAN,
                "defer_loading": BOOLEAN,
            },
            "required": ["name", "input_schema"],
        },
    },
    "tool_choice": {**TOOL_CHOICE, "type": ["object", "null"]},
    "thinking": {
        "type": ["object", "null"],
        "properties": {"type": {"type": "string"}, "budget_tokens": INTEGER, "display": STRING},
    },
    "output_config": {"type": ["object", "null"], "properties": {"effort": STRING, "format": OBJECT}},
    "chat_template_kwargs": TEMPLATE_OPTIONS,
}
MESSAGES_API: Mapping[str, Schema] = {
    **COUNTED_MESSAGES,
    "max_tokens": INTEGER,
    "stream": STREAM,
    "stop_sequences": STOP_SEQUENCES,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INTEGER,
    "metadata": OBJECT,
    "watermarking": BOOLEAN,
    "vllm_xargs": XARGS,
}
COMPLETION: Mapping[str, Schema] = {
    **SAMPLING,
    "prompt": {
        "description": TEXTS["description"],
        "type": ["string", "array", "null"],
        "items": {"type": ["string", "integer", "array"], "items": {"type": "integer", "minimum": 0}},
    },
    "suffix": STRING,
    "stream": STREAM,
    "stream_options": STREAM_OPTIONS,
    "logprobs": INTEGER,
}
CHAT_BATCH: Mapping[str, Schema] = {
    **SAMPLING,
    **_TEMPLATE,
    "messages": {"type": "array", "items": MESSAGES, "description": "a list of chats"},
    "max_completion_tokens": INTEGER,
    "logprobs": BOOLEAN,
    "top_logprobs": INTEGER,
    "tool_choice": STRING,
    "include_reasoning": BOOLEAN,
    "early_stopping": BOOLEAN,
    "guided_decoding_backend": STRING,
}
POOLING: Mapping[str, Schema] = {
    **_TEMPLATE,
    "input": TEXTS,
    "messages": MESSAGES_OR_CHATS,
    "encoding_format": {"type": "string", "enum": ["float", "base64", "bytes_only"]},
    "dimensions": INTEGER,
    "truncate_prompt_tokens": INTEGER,
    "priority": {"type": "integer"},
    "user": STRING,
}
CLASSIFY: Mapping[str, Schema] = {
    **_TEMPLATE,
    "input": TEXTS,
    "messages": MESSAGES_OR_CHATS,
    "truncate_prompt_tokens": INTEGER,
    "user": STRING,
}
SCORE: Mapping[str, Schema] = {
    **dict.fromkeys(("queries", "documents", "items", "data_1", "data_2", "text_1", "text_2"), SCORED),
    "instruction": STRING,
    "truncate_prompt_tokens": INTEGER,
}
RERANK: Mapping[str, Schema] = {
    "query": SCORED,
    "documents": SCORED,
    "top_n": {"type": "integer"},
    "instruction": STRING,
    "truncate_prompt_tokens": INTEGER,
}
SOUND: Mapping[str, Schema] = {
    "file": {"type": "string", "format": "binary"},
    "model": STRING,
    "language": STRING,
    "to_language": STRING,
    "prompt": STRING,
    "response_format": STRING,
    "timestamp_granularities[]": STRING,
    "stream": STREAM,
    "stream_include_usage": BOOLEAN,
    "stream_continuous_usage_stats": BOOLEAN,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INTEGER,
    "min_p": NUMBER,
    "seed": INTEGER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "max_completion_tokens": INTEGER,
}
TOKENIZE: Mapping[str, Schema] = {
    **_TEMPLATE,
    "prompt": {"type": "string"},
    "messages": MESSAGES,
    "add_special_tokens": {"type": "boolean"},
    "return_token_strs": BOOLEAN,
    "tools": TOOLS,
}
DETOKENIZE: Mapping[str, Schema] = {"tokens": TOKEN_IDS}

# Answers of vLLM, with the fields that clients read.
USAGE: Schema = {
    "type": ["object", "null"],
    "properties": {
        name: {"type": ["integer", "null"]} for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    },
}


def listed(key: str, **others: Schema) -> Schema:
    """Return the schema of an answer with a list of objects under `key`."""
    properties = {
        "id": {"type": "string"},
        "model": {"type": "string"},
        key: {"type": "array", "items": {"type": "object"}},
        "usage": USAGE,
        **others,
    }
    return {"type": "object", "properties": properties, "required": [key]}


GENERATED = listed("choices", object={"type": "string"}, created={"type": "integer"})
POOLED = listed("data", object={"type": "string"}, created={"type": "integer"})
RANKED = listed("results")
WRITTEN: Schema = {"type": "object", "properties": {"text": {"type": "string"}}}
TOKENS: Schema = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "max_model_len": {"type": "integer"},
        "tokens": TOKEN_IDS,
        "token_strs": STRINGS,
    },
    "required": ["count", "max_model_len", "tokens"],
}
ANSWERED: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string"},
        "status": {"type": "string"},
        "model": {"type": "string"},
        "output": {"type": "array", "items": {"type": "object"}},
        "usage": {
            "type": ["object", "null"],
            "properties": {
                name: {"type": "integer"} for name in ("input_tokens", "output_tokens", "total_tokens")
            },
        },
    },
    "required": ["id", "object", "status", "output"],
}
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"type": "string", "enum": ["message"]},
        "role": {"type": "string", "enum": ["assistant"]},
        "model": {"type": "string"},
        "content": {"type": "array", "items": {"type": "object"}},
        "stop_reason": STRING,
        "stop_sequence": STRING,
        "usage": {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in ("input_tokens", "output_tokens")},
        },
    },
    "required": ["id", "type", "role", "model", "content", "usage"],
}
NUM_TOKENS: Schema = {
    "type": "object",
    "properties": {"input_tokens": {"type": "integer"}},
    "required": ["input_tokens"],
}
TEXT_OF_TOKENS: Schema = {
    "type": "object",
    "properties": {"prompt": {"type": "string"}},
    "required": ["prompt"],
}
