"""Bounds of each field, and of the cost of all fields of a request together.

vLLM takes each of these from any caller, and lets one request end, fill or falsify what others share: see the
table in docs/operations/security.md.
"""

from collections.abc import Mapping
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_gateway.endpoints.answer_cost import AnswerCost
from triptych_gateway.endpoints.endpoint import Endpoint
from triptych_gateway.request.bounds.shapes import MAX_SHOWN_CHARS, check_shape
from triptych_gateway.request.forms.form import RequestLimits

TEMPLATE_FIELD = "chat_template_kwargs"
# Parameters of transformers' `apply_chat_template` and of the tokenizers and processors that it calls, and of
# vLLM's own: `{"padding": "max_length", "max_length": 10**8}` fills a host's memory with 182 bytes.
# tests/unit/prefill_decode/test_body_shapes.py derives them from the signatures.
TEMPLATE_PARAMETERS = frozenset(
    """
    add_generation_prompt add_special_tokens audio_kwargs chat_template common_kwargs continue_final_message
    conversation documents images_kwargs is_split_into_words kwargs load_audio_from_video max_length messages
    model_config pad_to_multiple_of padding padding_side processor_kwargs return_assistant_tokens_mask
    return_attention_mask return_dict return_length return_mm_token_type_ids return_offsets_mapping
    return_overflowing_tokens return_special_tokens_mask return_tensors return_text_replacement_offsets
    return_token_type_ids self stride text text_kwargs text_pair text_pair_target text_target tokenize
    tokenizer tokenizer_kwargs tools truncation verbose video_load_backend videos_kwargs
    """.split()  # noqa: SIM905 -- a line for each would be a page
)
# A field that makes vLLM's V1 sampler give other requests of the batch wrong log probabilities.
MIXING_FIELDS = ("logprob_token_ids",)


def check_fields(
    fields: Mapping[str, Any], endpoint: Endpoint, limits: RequestLimits, num_prompt_bytes: int
) -> None:
    """Check a parsed body, but for its inputs, which have checks of their own.

    Raises:
        RequestError: 400, `param` names the field.
    """
    for name in MIXING_FIELDS:
        if fields.get(name) is not None:
            message = f"{name} is not served: it changes the log probabilities of other requests"
            raise RequestError(400, "unsupported", message, name)
    for name, schema in endpoint.passed_fields.items():
        if name in fields:
            check_shape(fields[name], schema, name)
    for name in fields.get(TEMPLATE_FIELD) or ():
        if name in TEMPLATE_PARAMETERS:
            path = f"{TEMPLATE_FIELD}.{name[:MAX_SHOWN_CHARS]}"
            raise RequestError(400, "field_not_allowed", f"{path} may not be set by callers", path)
    cost = AnswerCost.of(fields, num_prompt_bytes)
    if cost.num_choices > 1 and cost.num_answer_tokens > limits.max_answer_tokens:
        message = (
            f"{cost.count_field} asks for {cost.num_choices} answers of up to {cost.tokens_each} tokens"
            f" ({limits.max_answer_tokens} together at most): name fewer, or a smaller max_tokens"
        )
        raise RequestError(400, "invalid_value", message, cost.count_field)
    if cost.num_logprobs > limits.max_logprobs:
        message = (
            f"{cost.logprobs_field} asks for about {cost.num_logprobs} log probabilities"
            f" ({limits.max_logprobs} at most)"
        )
        raise RequestError(400, "invalid_value", message, cost.logprobs_field)
