"""Bodies of a disaggregated request for its prefill and its decode instance. Pure.

The prefill instance gets the request with one token to generate, which is dropped: the decode instance makes
it again from the same KV cache. Fields that shape the prompt stay, so that both have the same one. All other
options of tokens and of the answer go to the decode instance alone.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from triptych_gateway.endpoints.endpoint import ChatForm, Endpoint, EndpointKind, ServedBy

PARAMS = "kv_transfer_params"
ASKED_OF_PREFILL: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# A token is made, and no answer sent: these would have it refused, or cost time in vain.
ONLY_FOR_DECODE = frozenset(
    {
        "stream", "stream_options", "stream_interval",
        "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens",
        "stop", "stop_sequences", "stop_token_ids",
        "n", "best_of", "logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs", "echo",
        "include", "return_token_ids", "return_tokens_as_token_ids", "return_token_offsets",
        "store", "background",
    }
)  # fmt: skip
_ONE_TOKEN: Mapping[ChatForm, Mapping[str, Any]] = {
    ChatForm.COMPLETIONS: {"max_tokens": 1},
    ChatForm.MESSAGES: {"max_tokens": 1},
    ChatForm.RESPONSES: {"max_output_tokens": 1, "store": False},
}
# Of `POST /v1/completions`: several prompts in one request.
_PROMPT = "prompt"
# Each would need a KV cache of its own, or what is computed where the KV cache is not.
_NOT_ONE = ("n", "best_of")
_UNDIVIDED = (
    "use_beam_search",
    "prompt_logprobs",
    "echo",
    "truncate_prompt_tokens",  # by the number of tokens that may be made
    "background",
    "previous_response_id",
)


def undivided_field(endpoint: Endpoint, body: Mapping[str, Any]) -> str | None:
    """Return the first field that prevents disaggregation of the request, or None."""
    if endpoint.served_by is not ServedBy.STAGES:
        return None
    for name in _NOT_ONE:
        if body.get(name) not in (None, 1):
            return name
    for name in _UNDIVIDED:
        value = body.get(name)
        if value is not None and value is not False:
            return name
    if body.get("truncation") not in (None, "disabled"):
        return "truncation"
    if endpoint.kind is EndpointKind.GENERATE and _has_several(body.get(_PROMPT)):
        return _PROMPT
    return None


def _has_several(prompt: Any) -> bool:
    """Return whether there are several prompts or none: no text and no list of token ids."""
    return isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt)


def prefill_body(body: bytes, endpoint: Endpoint) -> bytes:
    """Return the body for prefill. Takes as long as parsing: milliseconds per MB."""
    fields = {name: value for name, value in orjson.loads(body).items() if name not in ONLY_FOR_DECODE}
    one_token = dict(_ONE_TOKEN[endpoint.chat_form])
    if endpoint.chat_form is ChatForm.COMPLETIONS and endpoint.kind is EndpointKind.CHAT:
        one_token["max_completion_tokens"] = 1
    return orjson.dumps({**fields, **one_token, "stream": False, PARAMS: ASKED_OF_PREFILL})


def handover_of(answer: bytes) -> dict[str, Any] | None:
    """Return the place of the KV cache from the prefill's answer; None if it keeps none."""
    try:
        parsed = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    params = parsed.get(PARAMS) if isinstance(parsed, dict) else None
    return params if isinstance(params, dict) and params else None


def decode_body(body: bytes, handover: Mapping[str, Any]) -> bytes:
    """Return `body`, a JSON object without such a field, with the place of the KV cache."""
    return body.rstrip()[:-1] + b',"' + PARAMS.encode() + b'":' + orjson.dumps(handover) + b"}"


def without_handover(answer: bytes) -> bytes:
    """Return a whole answer without the fields that engines exchange."""
    if b'"kv_transfer_params":{' not in answer:  # in text its quotes would be escaped
        return answer
    parsed = orjson.loads(answer)
    parsed.pop(PARAMS, None)
    return orjson.dumps(parsed)
