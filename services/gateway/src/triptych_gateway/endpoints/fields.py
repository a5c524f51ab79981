"""Fields that the gateway passes on, as the API's description shows them. vLLM documents and checks them."""

from collections.abc import Mapping

from triptych_gateway.endpoints.endpoint import Schema

BOOLEAN: Schema = {"type": ["boolean", "null"]}
INTEGER: Schema = {"type": ["integer", "null"]}
NUMBER: Schema = {"type": ["number", "null"]}
STRING: Schema = {"type": ["string", "null"]}
OBJECT: Schema = {"type": ["object", "null"]}
STRINGS: Schema = {"type": ["array", "null"], "items": {"type": "string"}}
INTEGERS: Schema = {"type": ["array", "null"], "items": {"type": "integer"}}
STRING_OR_STRINGS: Schema = {"type": ["string", "array", "null"], "items": {"type": "string"}}
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
MESSAGES: Schema = {
    "type": "array",
    "items": {
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
        },
        "required": ["role"],
    },
}
SCORED: Schema = {
    "description": "text, or an object whose `content` is a list of text parts; or a list of these",
    "anyOf": [
        {"type": "string"},
        {"type": "object"},
        {"type": "array", "items": {"type": ["string", "object"]}},
    ],
}
STREAM: Schema = {"type": ["boolean", "null"], "description": "answer by server-sent events"}

SAMPLING: Mapping[str, Schema] = {
    "max_tokens": INTEGER,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INTEGER,
    "min_p": NUMBER,
    "n": INTEGER,
    "seed": INTEGER,
    "stop": STRING_OR_STRINGS,
    "stop_token_ids": INTEGERS,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "logit_bias": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
    "min_tokens": INTEGER,
    "ignore_eos": BOOLEAN,
    "bad_words": STRINGS,
    "allowed_token_ids": INTEGERS,
    "prompt_logprobs": INTEGER,
    "response_format": OBJECT,
    "structured_outputs": OBJECT,
    "priority": {"type": "integer"},
    "user": STRING,
    "return_token_ids": BOOLEAN,
}
CHAT: Mapping[str, Schema] = {
    **SAMPLING,
    "messages": MESSAGES,
    "stream": STREAM,
    "stream_options": OBJECT,
    "max_completion_tokens": INTEGER,
    "logprobs": BOOLEAN,
    "top_logprobs": INTEGER,
    "tools": {"type": ["array", "null"], "items": {"type": "object"}},
    "tool_choice": {"type": ["string", "object", "null"]},
    "chat_template_kwargs": OBJECT,
    "mm_processor_kwargs": OBJECT,
    "media_io_kwargs": OBJECT,
}
BLOCKS: Schema = {
    "description": "text, or a list of text blocks",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
}
COUNTED_MESSAGES: Mapping[str, Schema] = {
    "messages": MESSAGES,
    "system": BLOCKS,
    "tools": {"type": ["array", "null"], "items": {"type": "object"}},
    "tool_choice": OBJECT,
    "thinking": OBJECT,
    "output_config": OBJECT,
    "chat_template_kwargs": OBJECT,
}
MESSAGES_API: Mapping[str, Schema] = {
    **COUNTED_MESSAGES,
    "max_tokens": {"type": "integer"},
    "stream": STREAM,
    "stop_sequences": STRINGS,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INTEGER,
    "metadata": OBJECT,
}
COMPLETION: Mapping[str, Schema] = {
    **SAMPLING,
    "prompt": TEXTS,
    "stream": STREAM,
    "stream_options": OBJECT,
    "echo": BOOLEAN,
    "logprobs": INTEGER,
}
CHAT_BATCH: Mapping[str, Schema] = {
    **SAMPLING,
    "messages": {"type": "array", "items": MESSAGES, "description": "a list of chats"},
    "max_completion_tokens": INTEGER,
    "logprobs": BOOLEAN,
    "top_logprobs": INTEGER,
}
POOLING: Mapping[str, Schema] = {
    "input": TEXTS,
    "messages": MESSAGES,
    "encoding_format": {"type": "string", "enum": ["float", "base64", "bytes_only"]},
    "dimensions": INTEGER,
    "truncate_prompt_tokens": INTEGER,
    "priority": {"type": "integer"},
    "user": STRING,
}
CLASSIFY: Mapping[str, Schema] = {
    "input": TEXTS,
    "messages": MESSAGES,
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
RESPONSE: Mapping[str, Schema] = {
    "input": {
        "description": "text, or a list of items: messages, calls of tools and their outputs",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
    },
    "instructions": STRING,
    "stream": STREAM,
    "store": {"type": ["boolean", "null"], "description": "where the instance keeps responses"},
    "background": BOOLEAN,
    "previous_response_id": STRING,
    "max_output_tokens": INTEGER,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INTEGER,
    "min_p": NUMBER,
    "seed": INTEGER,
    "stop": STRING_OR_STRINGS,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "logit_bias": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
    "ignore_eos": BOOLEAN,
    "include": STRINGS,
    "top_logprobs": INTEGER,
    "text": {"type": ["object", "null"], "description": "`format`: text, json_object or json_schema"},
    "structured_outputs": OBJECT,
    "tools": {"type": ["array", "null"], "items": {"type": "object"}},
    "tool_choice": {"type": ["string", "object", "null"]},
    "parallel_tool_calls": BOOLEAN,
    "reasoning": OBJECT,
    "include_reasoning": BOOLEAN,
    "truncation": {"type": ["string", "null"], "enum": ["auto", "disabled", None]},
    "metadata": OBJECT,
    "chat_template_kwargs": OBJECT,
    "mm_processor_kwargs": OBJECT,
    "media_io_kwargs": OBJECT,
    "enable_response_messages": BOOLEAN,
    "user": STRING,
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
    "prompt": {"type": "string"},
    "messages": MESSAGES,
    "add_special_tokens": {"type": "boolean"},
    "add_generation_prompt": {"type": "boolean"},
    "continue_final_message": {"type": "boolean"},
    "return_token_strs": BOOLEAN,
    "tools": {"type": ["array", "null"], "items": {"type": "object"}},
    "chat_template_kwargs": OBJECT,
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
    """An answer that has a list of objects under `key`."""
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
