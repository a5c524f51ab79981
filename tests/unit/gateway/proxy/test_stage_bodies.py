"""The bodies of a request that is divided, and what cannot be."""

from typing import Any

import orjson
import pytest

from triptych_gateway.endpoints.endpoint import Endpoint
from triptych_gateway.endpoints.table import CHAT, COUNT_TOKENS, CREATE_RESPONSE, FORWARDED, MESSAGES
from triptych_gateway.proxy.stages import (
    ASKED_OF_PREFILL,
    decode_body,
    handover_of,
    prefill_body,
    undivided_field,
    without_handover,
)

COMPLETION = next(each for each in FORWARDED if each.path == "/v1/completions")


@pytest.mark.parametrize(
    ("endpoint", "limits"),
    [
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 1}),
        (COMPLETION, {"max_tokens": 1}),
        (MESSAGES, {"max_tokens": 1}),
        (CREATE_RESPONSE, {"max_output_tokens": 1, "store": False}),
    ],
)
def test_one_token_is_made_where_it_is_prefilled(endpoint: Endpoint, limits: dict[str, Any]) -> None:
    shaping = {"model": "m", "messages": [], "tools": [{"a": 1}], "tool_choice": "auto", "cache_salt": "s"}
    other = {"stream": True, "stream_options": {}, "min_tokens": 4, "stop": ["x"], "n": 1, "store": True}
    sizes = {"max_tokens": 9, "max_completion_tokens": 9, "max_output_tokens": 9}
    sent = orjson.loads(prefill_body(orjson.dumps({**shaping, **other, **sizes}), endpoint))
    assert sent == {**shaping, **limits, "stream": False, "kv_transfer_params": ASKED_OF_PREFILL}


def test_who_decodes_gets_the_body_and_the_handover() -> None:
    handover = {"remote_block_ids": [[1, 2]], "remote_host": "h"}
    sent = orjson.loads(decode_body(b'{"a": "}", "stream": true} ', handover))
    assert sent == {"a": "}", "stream": True, "kv_transfer_params": handover}


@pytest.mark.parametrize(
    ("answer", "handover"),
    [
        (b'{"kv_transfer_params": {"a": 1}}', {"a": 1}),
        (b'{"kv_transfer_params": null}', None),
        (b'{"kv_transfer_params": {}}', None),
        (b"{}", None),
        (b"[]", None),
        (b"no json", None),
    ],
)
def test_handover(answer: bytes, handover: dict[str, Any] | None) -> None:
    assert handover_of(answer) == handover


def test_the_caller_is_told_nothing_of_it() -> None:
    assert without_handover(b'{"a": 1,"kv_transfer_params":{"b":2}}') == b'{"a":1}'
    untouched = rb'{"text": "\"kv_transfer_params\":{", "kv_transfer_params":null}'
    assert without_handover(untouched) == untouched


@pytest.mark.parametrize(
    ("endpoint", "body", "name"),
    [
        (CHAT, {}, None),
        (CHAT, {"n": 1, "logprobs": True, "echo": False, "seed": 1}, None),
        (CHAT, {"n": 2}, "n"),
        (CHAT, {"use_beam_search": True}, "use_beam_search"),
        (CHAT, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        (COMPLETION, {"prompt": "a"}, None),
        (COMPLETION, {"prompt": [1, 2]}, None),
        (COMPLETION, {"prompt": ["a"]}, "prompt"),
        (COMPLETION, {"prompt": [[1], [2]]}, "prompt"),
        (COMPLETION, {"prompt": "a", "best_of": 3}, "best_of"),
        (CREATE_RESPONSE, {"truncation": "disabled"}, None),
        (CREATE_RESPONSE, {"truncation": "auto"}, "truncation"),
        (CREATE_RESPONSE, {"background": True}, "background"),
        (CREATE_RESPONSE, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (COUNT_TOKENS, {"n": 2}, None),
    ],
)
def test_what_cannot_be_divided(endpoint: Endpoint, body: dict[str, Any], name: str | None) -> None:
    assert undivided_field(endpoint, body) == name
