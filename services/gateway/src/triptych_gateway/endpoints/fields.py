"""Fields that the gateway passes on: shown by the API's description, checked by `request.body_bounds`."""

from collections.abc import Mapping

from triptych_gateway.endpoints.endpoint import Schema
from triptych_gateway.endpoints.kinds import (
    ANY_OBJECT,
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
    TEXT,
    TEXTS,
    TOKEN_IDS,
    TOOL_CHOICE,
    TOOLS,
    TRUTH,
    WHOLE,
    XARGS,
    lists,
    objects,
    of_kind,
    or_null,
)

SAMPLING: Mapping[str, Schema] = {
    **SAMPLED,
    **of_kind(
        INTEGER,
        "max_tokens n best_of min_tokens prompt_logprobs thinking_token_budget stream_interval"
        " truncate_prompt_tokens routed_experts_prompt_start",
    ),
    **of_kind(
        BOOLEAN,
        "use_beam_search spaces_between_special_tokens add_special_tokens echo return_token_ids"
        " return_tokens_as_token_ids return_token_offsets return_weight_versions",
    ),
    "length_penalty": NUMBER,
    "bad_words": or_null(lists({**TEXT, "maxLength": MAX_BAD_WORD_CHARS}, MAX_BAD_WORDS)),
    "allowed_token_ids": or_null(lists(WHOLE, MAX_ALLOWED_TOKEN_IDS)),
    "response_format": RESPONSE_FORMAT,
    "repetition_detection": REPETITION,
    "truncation_side": STRING,
}
_TEMPLATE: Mapping[str, Schema] = {
    **of_kind(BOOLEAN, "add_generation_prompt continue_final_message"),
    "chat_template_kwargs": TEMPLATE_OPTIONS,
    **of_kind(OBJECT, "mm_processor_kwargs media_io_kwargs"),
}
CHAT: Mapping[str, Schema] = {
    **SAMPLING,
    **_TEMPLATE,
    "messages": MESSAGES,
    "stream": STREAM,
    "stream_options": STREAM_OPTIONS,
    **of_kind(INTEGER, "max_completion_tokens top_logprobs"),
    **of_kind(BOOLEAN, "logprobs parallel_tool_calls include_reasoning return_prompt_text"),
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
    "documents": or_null(lists({**ANY_OBJECT, "additionalProperties": TEXT}, 1024)),
    "reasoning_effort": STRING,
}
_BLOCK = objects(
    {
        "type": TEXT,
        **of_kind(STRING, "text id tool_use_id name tool_name thinking signature data"),
        **of_kind(OBJECT, "source input tool"),
        "content": {**lists(ANY_OBJECT), "type": ["string", "array", "null"]},
        "is_error": BOOLEAN,
    }
)
BLOCKS: Schema = {
    "description": "text, or a list of text blocks",
    "type": ["string", "array", "null"],
    "items": _BLOCK,
}
COUNTED_MESSAGES: Mapping[str, Schema] = {
    "messages": lists(
        objects({"role": TEXT, "content": {**lists(_BLOCK), "type": ["string", "array"]}}, "role")
    ),
    "system": BLOCKS,
    "tools": or_null(
        lists(
            objects(
                {"name": TEXT, "description": STRING, "input_schema": ANY_OBJECT}
                | of_kind(BOOLEAN, "strict defer_loading"),
                "name",
                "input_schema",
            ),
            MAX_TOOLS,
        )
    ),
    "tool_choice": {**TOOL_CHOICE, "type": ["object", "null"]},
    "thinking": or_null(objects({"type": TEXT, "budget_tokens": INTEGER, "display": STRING})),
    "output_config": or_null(objects({"effort": STRING, "format": OBJECT})),
    "chat_template_kwargs": TEMPLATE_OPTIONS,
}
MESSAGES_API: Mapping[str, Schema] = {
    **COUNTED_MESSAGES,
    **of_kind(INTEGER, "max_tokens top_k"),
    "stream": STREAM,
    "stop_sequences": STOP_SEQUENCES,
    **of_kind(NUMBER, "temperature top_p"),
    "metadata": OBJECT,
    "watermarking": BOOLEAN,
    "vllm_xargs": XARGS,
}
COMPLETION: Mapping[str, Schema] = {
    **SAMPLING,
    "prompt": {
        "description": TEXTS["description"],
        "type": ["string", "array", "null"],
        "items": {**TOKEN_IDS, "type": ["string", "integer", "array"]},
    },
    "suffix": STRING,
    "stream": STREAM,
    "stream_options": STREAM_OPTIONS,
    "logprobs": INTEGER,
}
CHAT_BATCH: Mapping[str, Schema] = {
    **SAMPLING,
    **_TEMPLATE,
    "messages": {**lists(MESSAGES), "description": "a list of chats"},
    **of_kind(INTEGER, "max_completion_tokens top_logprobs"),
    **of_kind(BOOLEAN, "logprobs include_reasoning early_stopping"),
    **of_kind(STRING, "tool_choice guided_decoding_backend"),
}
CLASSIFY: Mapping[str, Schema] = {
    **_TEMPLATE,
    "input": TEXTS,
    "messages": MESSAGES_OR_CHATS,
    "truncate_prompt_tokens": INTEGER,
    "user": STRING,
}
POOLING: Mapping[str, Schema] = {
    **CLASSIFY,
    "encoding_format": {**TEXT, "enum": ["float", "base64", "bytes_only"]},
    "dimensions": INTEGER,
    "priority": WHOLE,
}
SCORE: Mapping[str, Schema] = {
    **of_kind(SCORED, "queries documents items data_1 data_2 text_1 text_2"),
    "instruction": STRING,
    "truncate_prompt_tokens": INTEGER,
}
RERANK: Mapping[str, Schema] = {
    **of_kind(SCORED, "query documents"),
    "top_n": WHOLE,
    "instruction": STRING,
    "truncate_prompt_tokens": INTEGER,
}
SOUND: Mapping[str, Schema] = {
    "file": {**TEXT, "format": "binary"},
    **of_kind(STRING, "model language to_language prompt response_format timestamp_granularities[]"),
    "stream": STREAM,
    **of_kind(BOOLEAN, "stream_include_usage stream_continuous_usage_stats"),
    **of_kind(NUMBER, "temperature top_p min_p presence_penalty frequency_penalty repetition_penalty"),
    **of_kind(INTEGER, "top_k seed max_completion_tokens"),
}
TOKENIZE: Mapping[str, Schema] = {
    **_TEMPLATE,
    "prompt": TEXT,
    "messages": MESSAGES,
    "add_special_tokens": TRUTH,
    "return_token_strs": BOOLEAN,
    "tools": TOOLS,
}
DETOKENIZE: Mapping[str, Schema] = {"tokens": TOKEN_IDS}

# Answers of vLLM, with the fields that clients read.
USAGE = or_null(objects(of_kind(INTEGER, "prompt_tokens completion_tokens total_tokens")))


def listed(key: str, **others: Schema) -> Schema:
    """Return the schema of an answer with a list of objects under `key`."""
    return objects({"id": TEXT, "model": TEXT, key: lists(ANY_OBJECT), "usage": USAGE, **others}, key)


GENERATED = listed("choices", object=TEXT, created=WHOLE)
POOLED = listed("data", object=TEXT, created=WHOLE)
RANKED = listed("results")
WRITTEN = objects({"text": TEXT})
TOKENS = objects(
    {"count": WHOLE, "max_model_len": WHOLE, "tokens": TOKEN_IDS, "token_strs": STRINGS},
    "count",
    "max_model_len",
    "tokens",
)
ANSWERED = objects(
    {
        **of_kind(TEXT, "id object status model"),
        "output": lists(ANY_OBJECT),
        "usage": or_null(objects(of_kind(WHOLE, "input_tokens output_tokens total_tokens"))),
    },
    *("id", "object", "status", "output"),
)
MESSAGE = objects(
    {
        "id": TEXT,
        "type": {**TEXT, "enum": ["message"]},
        "role": {**TEXT, "enum": ["assistant"]},
        "model": TEXT,
        "content": lists(ANY_OBJECT),
        **of_kind(STRING, "stop_reason stop_sequence"),
        "usage": objects(of_kind(WHOLE, "input_tokens output_tokens")),
    },
    *("id", "type", "role", "model", "content", "usage"),
)
NUM_TOKENS = objects({"input_tokens": WHOLE}, "input_tokens")
TEXT_OF_TOKENS = objects({"prompt": TEXT}, "prompt")
