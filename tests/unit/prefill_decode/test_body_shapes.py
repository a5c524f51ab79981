"""No body that passes the gateway makes vLLM's unions multiply: few errors, whatever stands where."""

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, ValidationError

from triptych_common.domain.errors import RequestError
from triptych_gateway.endpoints.endpoint import Endpoint, TextBody
from triptych_gateway.endpoints.table import CREATE_RESPONSE, FORWARDED
from triptych_gateway.request.body_bounds import MIXING_FIELDS, TEMPLATE_PARAMETERS
from triptych_gateway.request.chat_request import (
    REFUSED_FIELDS,
    STRIPPED_FIELDS,
    RequestOptions,
    parse_chat_request,
)
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard
from triptych_gateway.request.text_request import parse_text_request
from triptych_gateway.responses.exchange import ResponseRequest
from triptych_gateway.settings import RequestSettings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own
    import transformers
    from transformers import processing_utils
    from vllm.entrypoints.anthropic import protocol as anthropic
    from vllm.entrypoints.openai.chat_completion import protocol as chats
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.serve.tokenize import protocol as tokens
    from vllm.renderers import hf

MAX_ERRORS = 60  # of one body in vLLM; there were 693,001
BY_PATH = {endpoint.path: endpoint for endpoint in FORWARDED}
MODELS: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/chat/completions": (chats.ChatCompletionRequest,),
    "/v1/chat/completions/batch": (chats.BatchChatCompletionRequest,),
    "/v1/completions": (CompletionRequest,),
    "/v1/responses": (ResponsesRequest,),
    "/v1/messages": (anthropic.AnthropicMessagesRequest,),
    "/v1/messages/count_tokens": (anthropic.AnthropicCountTokensRequest,),
    "/tokenize": (tokens.TokenizeCompletionRequest, tokens.TokenizeChatRequest),
}
# Fields of vLLM's that hold one value of a literal, a number or a boolean: one error at most.
SIMPLE = {"mm_payload", "return_mm_kwargs", "service_tier"}
NUM = 61
JUNK: dict[str, Any] = {
    "numbers": [5] * NUM,
    "objects": [{}] * NUM,
    "texts": ["a"] * NUM,
    "lists": [[]] * NUM,
    "typed": [{"type": "text"}] * NUM,
    "odd types": [{"type": 5, "role": 5}] * NUM,
    "parts": [{"type": "input_text", "text": "a", "detail": []}] * NUM,
    "object of numbers": {f"k{index}": 5 for index in range(NUM)},
    "object of lists": {f"k{index}": [{}, "a"] for index in range(NUM)},
}
USER = {"role": "user", "content": "a"}
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/chat/completions/batch": {"messages": [[USER]]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [USER], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/tokenize": {"messages": [USER]},
}
# Objects that may stand many times in a body, each with the keys that vLLM reads.
_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REPEATED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "/v1/chat/completions": [
        ("messages", USER),
        ("messages", {"role": "assistant", "content": "a", "tool_calls": [_CALL], "name": "a"}),
        ("messages", {"role": "tool", "content": "a", "tool_call_id": "a"}),
        ("messages", {"role": "function", "content": "a"}),
        ("messages", {"role": "user", "content": [{"type": "text", "text": "a"}] * 4}),
        ("messages", {"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}] * 4}),
        ("messages", {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}] * 4}),
        ("messages", {"role": "assistant", "content": "a", "refusal": "a", "audio": {}, "reasoning": "a"}),
        ("messages", {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}, "tools": []}),
        ("tools", {"type": "function", "function": {"name": "f", "parameters": {}, "description": "a"}}),
    ],
    "/v1/responses": [
        ("input", {**USER, "type": "message", "status": "completed", "id": "a", "phase": "final_answer"}),
        ("input", {"role": "user", "content": [{"type": "input_text", "text": "a"}] * 4}),
        ("input", {"role": "assistant", "content": [{"type": "output_text", "text": "a"}] * 4}),
        (
            "input",
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}] * 4},
        ),
        ("input", {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "id": "a"}),
        ("input", {"type": "custom_tool_call", "call_id": "a", "name": "f", "input": "a", "id": "a"}),
        (
            "input",
            {
                "type": "function_call_output",
                "call_id": "a",
                "output": "a",
                "status": "completed",
                "name": "f",
            },
        ),
        ("input", {"type": "custom_tool_call_output", "call_id": "a", "output": "a"}),
        ("input", {"type": "reasoning", "id": "a", "summary": [], "content": [], "encrypted_content": "a"}),
        ("input", {"type": "local_shell_call", "id": "a", "action": {}, "call_id": "a", "status": "a"}),
        ("input", {"type": "web_search_call", "id": "a", "action": {}, "status": "a"}),
        ("input", {"type": "item_reference", "id": "a"}),
        ("input", {"type": "nothing"}),
        ("input", {}),
        ("tools", {"type": "function", "name": "f", "parameters": {}, "strict": True, "description": "a"}),
        ("tools", {"type": "custom", "name": "f", "format": {}, "description": "a"}),
        ("tools", {"type": "namespace", "name": "f", "tools": [], "description": "a"}),
    ],
    "/v1/messages": [
        ("messages", USER),
        ("messages", {"role": "user", "content": [{"type": "text", "text": "a"}] * 4}),
        ("messages", {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}] * 4}),
        ("messages", {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}] * 4}),
        ("messages", {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}] * 4}),
        ("tools", {"name": "f", "description": "a", "input_schema": {}}),
    ],
}


def num_errors(path: str, body: dict[str, Any]) -> int:
    """In vLLM, of a body that passes the gateway; of one that does not, none."""
    endpoint = BY_PATH[path]
    raw = orjson.dumps({"model": "m", **body})
    try:
        forwarded = _parse(endpoint, raw)
    except RequestError as error:
        assert error.param is None or len(error.param) < 400  # noqa: PT017
        return 0
    counts = []
    for model in MODELS[path]:
        try:
            model.model_validate(orjson.loads(orjson.dumps(forwarded)))
            return 0
        except ValidationError as error:
            counts.append(error.error_count())
        except Exception:  # vLLM's own checks, which stop at the first
            counts.append(1)
    return max(counts)


def _parse(endpoint: Endpoint, raw: bytes) -> dict[str, Any]:
    guard = PlaceholderGuard(())
    if endpoint.body is TextBody:
        return parse_text_request(raw, endpoint, guard, RequestSettings(), RequestOptions()).body
    request = parse_chat_request(raw, guard, 16, endpoint=endpoint)
    return ResponseRequest.of_chat(request, "r").body if endpoint is CREATE_RESPONSE else request.body


def bodies(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Junk in each field; then junk in each key of each object that may stand many times."""
    for name in sorted({name for model in MODELS[path] for name in model.model_fields}):
        for kind, junk in JUNK.items():
            yield f"{name}: {kind}", {**BASES[path], name: junk}
    for place, sample in REPEATED.get(path, ()):
        for key in (*sample, "annotations", "logprobs", "cache_control", "extra"):
            for kind, value in (
                ("number", 5),
                ("list", [5, {}, "a", []]),
                ("object", {"a": [5]}),
                ("no", None),
            ):
                yield f"{place}[].{key}: {kind}", {**BASES[path], place: [{**sample, key: value}] * NUM}
        inner = sample.get("content")
        if isinstance(inner, list) and inner:
            for key in (*inner[0], "annotations", "logprobs", "content", "source", "input", "extra"):
                for kind, value in (("number", 5), ("list", [5, {}]), ("object", {"a": [5]}), ("no", None)):
                    parts = [{**inner[0], key: value}] * 4
                    item = {**sample, "content": parts}
                    yield f"{place}[].content[].{key}: {kind}", {**BASES[path], place: [item] * NUM}


@pytest.mark.parametrize("path", MODELS)
def test_vllm_finds_few_errors_in_what_the_gateway_passes(path: str) -> None:
    worst = {case: number for case, body in bodies(path) if (number := num_errors(path, body)) > MAX_ERRORS}
    assert not worst, "\n".join(f"{case}: {number}" for case, number in worst.items())


@pytest.mark.parametrize("path", MODELS)
def test_every_field_of_vllms_is_known(path: str) -> None:
    endpoint = BY_PATH[path]
    known = {*endpoint.passed_fields, *endpoint.inputs, *endpoint.refused_fields, *REFUSED_FIELDS}
    known |= {*STRIPPED_FIELDS, *MIXING_FIELDS, *SIMPLE, "model"}
    assert {name for model in MODELS[path] for name in model.model_fields} <= known


def test_the_parameters_of_templates_are_those_of_transformers() -> None:
    functions = (
        transformers.PreTrainedTokenizerBase.apply_chat_template,
        transformers.ProcessorMixin.apply_chat_template,
        transformers.PreTrainedTokenizerBase.__call__,
        hf.safe_apply_chat_template,
    )
    wanted = {name for function in functions for name in inspect.signature(function).parameters}
    wanted |= processing_utils.TextKwargs.__annotations__.keys()
    wanted |= processing_utils.ProcessingKwargs.__annotations__.keys()
    assert wanted <= TEMPLATE_PARAMETERS
