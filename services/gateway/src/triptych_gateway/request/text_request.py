"""Validation of forwarded bodies other than chat completions: none may hold media.

An input is text, token ids, messages, objects with a `content`, or a list of these. Each of them is checked
here: vLLM would fetch media that it finds, from wherever a caller says. Everything else passes through to
vLLM, which validates it again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

from triptych_common.domain.errors import RequestError
from triptych_gateway.endpoints.endpoint import Endpoint, EndpointKind, TextBody
from triptych_gateway.request.body_bounds import check_bounds, check_fields, prompt_too_large
from triptych_gateway.request.body_splitter import SplitBody
from triptych_gateway.request.chat_request import (
    RequestOptions,
    RequestParser,
    parse_object,
    passed_body,
    refuse_privileged,
    run_parse,
    salted_body,
    validate_body,
)
from triptych_gateway.request.content_parts import MediaPart, check_text_part, check_text_parts
from triptych_gateway.request.forms.grammar_bounds import GrammarBounds, check_grammars
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard
from triptych_gateway.settings import RequestSettings

MAX_INPUTS = 2048  # of a request that pools, as OpenAI's API has it
MAX_LISTS = 2  # lists of lists of token ids, or of messages


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Valid request without media."""

    body: dict[str, Any]  # of `passed_body`, with the tenant's salt where it is one's
    model: str  # "": the caller names none
    stream: bool
    endpoint: Endpoint
    num_prompt_bytes: int
    checked_tokens: frozenset[str]
    media: tuple[MediaPart, ...] = ()
    num_media_bytes: int = 0

    @property
    def is_computed(self) -> bool:
        """True if the model computes it: it leaves something in a cache, and takes time of the engine."""
        return self.endpoint.is_computed

    def check_placeholders(self, tokens: Iterable[str]) -> None:
        unchecked = frozenset(tokens) - self.checked_tokens
        if unchecked and self.is_computed:
            PlaceholderGuard(tuple(unchecked)).check_texts(self.body, (), self.endpoint.inputs)

    def of_tenant(self, salt: str) -> Self:
        return replace(self, body=salted_body(self.body, salt, self.endpoint))

    def with_model(self, model: str) -> "TextRequest":
        if model == self.model:
            return self
        return replace(self, model=model, body={**self.body, "model": model})


def parse_text_request(
    raw: bytes | bytearray,
    endpoint: Endpoint,
    guard: PlaceholderGuard,
    limits: RequestSettings,
    options: RequestOptions,
) -> TextRequest:
    """Validate one body for `endpoint`. Takes a while for a large one: tens of milliseconds.

    Raises:
        RequestError: 400, `param` names the field; 413 too much text.
    """
    check_bounds(raw, limits)
    fields = parse_object(raw)
    body = validate_body(TextBody, fields)
    refuse_privileged(fields, endpoint)
    options.check_options(fields)
    check_grammars(fields, GrammarBounds(limits.max_grammar_chars))
    for name in endpoint.inputs:
        _check_input(fields.get(name), name, limits.max_messages)
    _check_numbers(fields, body, endpoint, limits)
    _check_stream(body, endpoint)
    if len(raw) > limits.max_prompt_bytes:  # text that begins like media, and is none
        raise prompt_too_large(limits.max_prompt_bytes)
    if endpoint.is_computed:
        guard.check_texts(fields, (), endpoint.inputs)
    check_fields(fields, endpoint, limits, len(raw))
    return TextRequest(
        body=passed_body(fields, endpoint),
        model=body.model or "",
        stream=endpoint.streams and bool(body.stream),
        endpoint=endpoint,
        num_prompt_bytes=len(raw),
        checked_tokens=guard.tokens_of(body.model or ""),
    )


async def read_text_request(
    parser: RequestParser, body: SplitBody, on_growth: Callable[[int], None], endpoint: Endpoint
) -> TextRequest:
    """Return the request of `body`, as `RequestParser.parse` does for a chat."""
    on_growth(body.num_bytes)

    def parse() -> TextRequest:
        return parse_text_request(body.put_back(), endpoint, parser.guard, parser.limits, parser.options)

    return await run_parse(parser.threads, body.num_bytes, parse)


def _check_input(value: Any, path: str, max_messages: int, num_lists: int = 0) -> None:
    if value is None or isinstance(value, str):
        return
    if isinstance(value, dict):
        _check_object(value, path)
        return
    if not isinstance(value, list) or num_lists > MAX_LISTS:
        raise _no_input(path)
    kinds = {type(each) for each in value}
    if kinds <= {int}:
        if value and min(value) < 0:
            raise RequestError(400, "invalid_value", f"{path}: token ids must be 0 or more", path)
    elif kinds <= {str, dict}:
        objects = [(index, each) for index, each in enumerate(value) if isinstance(each, dict)]
        if len(objects) > max_messages:
            raise RequestError(400, "invalid_value", f"{path} holds more than {max_messages}", path)
        for index, each in objects:
            _check_object(each, f"{path}[{index}]")
    elif kinds == {list}:
        for index, each in enumerate(value):
            _check_input(each, f"{path}[{index}]", max_messages, num_lists + 1)
    else:
        raise _no_input(path)


def _no_input(path: str) -> RequestError:
    message = f"{path} must be text, token ids or messages, or a list of one of these"
    return RequestError(400, "invalid_type", message, path)


def _check_object(value: dict[str, Any], path: str) -> None:
    """Check a message, a scored object with a content, or one part of a content."""
    content = value.get("content")
    if isinstance(content, list):
        check_text_parts(content, f"{path}.content")
    elif content is not None and not isinstance(content, str):
        message = f"{path}.content must be a string or a list of parts"
        raise RequestError(400, "invalid_type", message, f"{path}.content")
    if content is None and value.get("role", "assistant") != "assistant":
        raise RequestError(400, "missing_field", f"{path}.content is missing", f"{path}.content")
    if "type" in value and "role" not in value:
        check_text_part(value, path)


def _check_numbers(
    fields: dict[str, Any], body: TextBody, endpoint: Endpoint, limits: RequestSettings
) -> None:
    numbers = [(name, _num_inputs(fields.get(name))) for name in endpoint.inputs]
    if endpoint.kind is EndpointKind.POOL:
        for name, number in numbers:
            if number > MAX_INPUTS:
                raise RequestError(400, "invalid_value", f"{name} holds more than {MAX_INPUTS}", name)
    elif endpoint.kind is EndpointKind.GENERATE:
        num_choices = max(body.n or 1, 1)
        if num_choices > limits.max_choices:
            raise RequestError(400, "invalid_value", f"n may be {limits.max_choices} at most", "n")
        for name, number in numbers:
            if number * num_choices > limits.max_choices:
                message = f"{name} may ask for {limits.max_choices} choices at most, n for each input"
                raise RequestError(400, "invalid_value", message, name)
    # vLLM reads it whatever else it is given, and then sends what describes the bytes in a header.
    if endpoint.kind is EndpointKind.POOL and fields.get("encoding_format") == "bytes":
        message = "encoding_format bytes is not served; bytes_only is"
        raise RequestError(400, "unsupported", message, "encoding_format")


def _check_stream(body: TextBody, endpoint: Endpoint) -> None:
    """Refuse streams of a batch of chats: vLLM would answer with the last tokens alone."""
    if body.stream and endpoint.kind is EndpointKind.GENERATE and not endpoint.streams:
        raise RequestError(400, "unsupported", f"{endpoint.path} does not stream", "stream")


def _num_inputs(value: Any) -> int:
    """Return the number of texts, lists of token ids, or lists of messages in one field."""
    if not isinstance(value, list):
        return 0 if value is None else 1
    is_one = all(isinstance(each, int) or (isinstance(each, dict) and "role" in each) for each in value)
    return 1 if is_one else len(value)
