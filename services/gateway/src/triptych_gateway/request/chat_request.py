"""Validation of a chat's body in any form: fields the gateway needs, and fields callers may not send.

`RequestOptions` decides on options of the processor and the media reader. vLLM does the same in front of its
renderer: an option changes an image's cost and the vision tower's input. Here, as there, all are refused
unless the operator lists them; then with bounds.

Everything else passes through to vLLM, which validates it again.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeVar

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError

from triptych_common.domain.errors import RequestError
from triptych_common.domain.hashing import caller_salt
from triptych_common.domain.media_options import MAX_NAME_CHARS, OptionRules, refused_option
from triptych_common.protocol.messages import Modality
from triptych_gateway.endpoints.endpoint import ChatForm, Endpoint
from triptych_gateway.endpoints.table import CHAT
from triptych_gateway.request.body_bounds import check_bounds, check_fields, prompt_too_large
from triptych_gateway.request.body_splitter import SplitBody
from triptych_gateway.request.content_parts import MediaPart, format_place, put_at, value_at
from triptych_gateway.request.forms.form import COMPLETIONS, Form
from triptych_gateway.request.forms.grammar_bounds import GrammarBounds, check_grammars
from triptych_gateway.request.forms.messages import MESSAGES
from triptych_gateway.request.forms.responses import RESPONSES
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard
from triptych_gateway.settings import RequestSettings

PROCESSOR_FIELD = "mm_processor_kwargs"
MEDIA_IO_FIELD = "media_io_kwargs"
OPTIONS_FIELDS = (PROCESSOR_FIELD, MEDIA_IO_FIELD)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options that requests may set; none by default."""

    processor: OptionRules = field(default_factory=dict)
    media: Mapping[Modality, OptionRules] = field(default_factory=dict)

    def check_options(self, fields: Mapping[str, Any]) -> None:
        """Check both fields of a request's body, as parsed; absent, null and {} are fine.

        Raises:
            RequestError: 400, `param` names the option, or the field where none is allowed at all.
        """
        processor_options = fields.get(PROCESSOR_FIELD)
        if processor_options is not None:
            _check(processor_options, self.processor, PROCESSOR_FIELD, PROCESSOR_FIELD)
        media_io_options = _object(fields.get(MEDIA_IO_FIELD), MEDIA_IO_FIELD)
        if media_io_options and not any(self.media.values()):
            raise _not_allowed(MEDIA_IO_FIELD)
        for name, options in media_io_options.items():
            path = f"{MEDIA_IO_FIELD}.{name[:MAX_NAME_CHARS]}"
            if name not in set(Modality):
                message = f"{path}: media are of type {', '.join(Modality)}"
                raise RequestError(400, "invalid_value", message, path)
            _check(options, self.media.get(Modality(name), {}), path, path)


def _check(options: Any, rules: OptionRules, path: str, field_name: str) -> None:
    options = _object(options, path)
    if options and not rules:
        raise _not_allowed(field_name)
    refusal = refused_option(options, rules)
    if refusal is not None:
        param = f"{path}.{refusal.name}"
        raise RequestError(400, "invalid_value", f"{param} {refusal.reason}", param)


def _object(value: Any, path: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(400, "invalid_value", f"{path} must be an object", path)
    return value


def _not_allowed(name: str) -> RequestError:
    return RequestError(400, "field_not_allowed", f"{name} may not be set by requests here", name)


# Set by the gateway and the engines alone. `chat_template` is code, which prefill_decode would run.
REFUSED_FIELDS = ("ec_transfer_params", "kv_transfer_params", "chat_template")
SALT_FIELD = "cache_salt"
# `request_id` is the gateway's; the processor options are in mm_hash and in the job, and would make
# vLLM rehash the item's uuid.
STRIPPED_FIELDS = (*REFUSED_FIELDS, SALT_FIELD, "request_id", *OPTIONS_FIELDS)
EMBEDS_FIELD = "prompt_embeds"

FORMS: Mapping[ChatForm, Form] = {
    ChatForm.COMPLETIONS: COMPLETIONS,
    ChatForm.MESSAGES: MESSAGES,
    ChatForm.RESPONSES: RESPONSES,
}
NO_OPTIONS = RequestOptions()
PARSE_INLINE_BYTES = 32 << 10
Parsed = TypeVar("Parsed")
Body = TypeVar("Body", bound=BaseModel)

DEFAULT_LIMITS = RequestSettings()
_FLAG = TypeAdapter(bool)


@dataclass(frozen=True)
class ChatRequest:
    """Valid chat request. The text of its media can be dropped once they were taken (`drop_text`)."""

    body: dict[str, Any]  # of `passed_body`, with the tenant's salt; media parts in place
    model: str  # "": the caller names none
    stream: bool
    media: tuple[MediaPart, ...]
    processor_options: dict[str, Any]
    media_io_options: dict[str, dict[str, Any]]  # keyed by modality, as in vLLM
    num_prompt_bytes: int = 0  # of the body as sent, without the text of its media
    tenant_salt: str = ""
    checked_tokens: frozenset[str] = frozenset()  # that its text does not contain
    endpoint: Endpoint = CHAT

    @property
    def num_media_bytes(self) -> int:
        return sum(part.num_sent_bytes for part in self.media)

    def check_placeholders(self, tokens: Iterable[str]) -> None:
        """Refuse text with any of `tokens`, which its instance announces; mostly checked at parsing.

        Raises:
            RequestError: 400.
        """
        unchecked = frozenset(tokens) - self.checked_tokens
        if unchecked:  # no instance was known when it was parsed
            _check_placeholders(PlaceholderGuard(tuple(unchecked)), self.body, self.endpoint)

    def of_tenant(self, salt: str) -> Self:
        """Return the request with its tenant's salt in the forwarded body; "" without a tenant."""
        if not salt:
            return self
        return replace(self, tenant_salt=salt, body=salted_body(self.body, salt, self.endpoint))

    def with_model(self, model: str) -> Self:
        if model == self.model:
            return self
        return replace(self, model=model, body={**self.body, "model": model})

    def drop_text(self, part: MediaPart) -> None:
        """Drop the text of a part whose bytes were taken; the part's place stays."""
        part.url, part.content = "", None
        if part.place:
            put_at(self.body, part.place, None)


def parse_chat_request(
    raw: bytes | bytearray,
    guard: PlaceholderGuard,
    max_items: int,
    limits: RequestSettings = DEFAULT_LIMITS,
    options: RequestOptions = NO_OPTIONS,
    split: SplitBody | None = None,
    endpoint: Endpoint = CHAT,
) -> ChatRequest:
    """Validate one body for `endpoint`. Takes a while for a large one: tens of milliseconds.

    Args:
        options: options that the request may set for processor and media reader.
        split: body with the text `raw`; None: `raw` is the body as sent.

    Raises:
        RequestError: 400, `param` names the field; 413 too much text.
    """
    check_bounds(raw, limits)
    form = FORMS[endpoint.chat_form]
    fields = parse_object(raw)
    body = validate_body(form.body, fields)
    refuse_privileged(fields, endpoint)
    options.check_options(fields)
    check_grammars(fields, GrammarBounds(limits.max_grammar_chars))
    name = endpoint.inputs[0]
    if isinstance(fields[name], list) and len(fields[name]) > limits.max_messages:
        message = f"{name} holds more than {limits.max_messages}"
        raise RequestError(400, "invalid_value", message, name)
    form.check_choices(body, limits.max_choices)
    media = form.find_media(fields, max_items)
    num_media_chars = sum(len(part.url) for part in media) if split is None else _take_split(media, split)
    num_prompt_bytes = (len(raw) if split is None else split.num_bytes) - num_media_chars
    if num_prompt_bytes > limits.max_prompt_bytes:  # text that begins like media, and is none
        raise prompt_too_large(limits.max_prompt_bytes)
    _check_placeholders(guard, fields, endpoint, media)
    check_fields(fields, endpoint, limits, num_prompt_bytes)
    if media:
        form.check_beside_media(fields)
    return ChatRequest(
        body=passed_body(fields, endpoint),
        model=body.model or "",
        stream=endpoint.streams and bool(body.stream),
        media=media,
        processor_options=fields.get(PROCESSOR_FIELD) or {},
        media_io_options={name: each for name, each in (fields.get(MEDIA_IO_FIELD) or {}).items() if each},
        num_prompt_bytes=num_prompt_bytes,
        checked_tokens=guard.tokens_of(body.model or ""),
        endpoint=endpoint,
    )


@dataclass(frozen=True, slots=True)
class RequestParser:
    """Parser with a gateway's bounds; large bodies are parsed in a thread, and the event loop goes on."""

    guard: PlaceholderGuard
    limits: RequestSettings
    options: RequestOptions
    threads: Executor

    async def parse(
        self, body: SplitBody, on_growth: Callable[[int], None], endpoint: Endpoint = CHAT
    ) -> ChatRequest:
        """Return the request of `body`, which is empty then.

        Args:
            on_growth: called with a number of bytes before they are held; may raise.
        """
        if body.num_media and not body.is_odd:
            request = await run_parse(self.threads, len(body.text), partial(self._try_split, body, endpoint))
            if request is not None:
                return request
        on_growth(body.num_bytes)
        return await run_parse(self.threads, body.num_bytes, lambda: self._parse(body.put_back(), endpoint))

    def _try_split(self, body: SplitBody, endpoint: Endpoint) -> ChatRequest | None:
        """Parse a split body; None if it must be read whole."""
        try:
            return self._parse(body.text, endpoint, body)
        except RequestError:
            return None  # reading it whole finds the same fault, with the caller's own terms

    def _parse(self, raw: bytearray, endpoint: Endpoint, split: SplitBody | None = None) -> ChatRequest:
        return parse_chat_request(
            raw, self.guard, self.limits.max_items, self.limits, self.options, split, endpoint
        )


def _check_placeholders(
    guard: PlaceholderGuard, body: dict[str, Any], endpoint: Endpoint, media: Sequence[MediaPart] = ()
) -> None:
    guard.check_texts(body, [value_at(body, part.place) for part in media], endpoint.inputs)
    guard.check_joined(str(body.get("model")), FORMS[endpoint.chat_form].joined_texts(body))


async def run_parse(threads: Executor, num_bytes: int, parse: Callable[[], Parsed]) -> Parsed:
    """Run `parse` for a body of `num_bytes`: at once if small, else in a thread."""
    if num_bytes <= PARSE_INLINE_BYTES:
        return parse()
    return await asyncio.get_running_loop().run_in_executor(threads, parse)


def _take_split(media: tuple[MediaPart, ...], split: SplitBody) -> int:
    """Give each part its bytes; return the number of characters in the body in their places.

    Raises:
        RequestError: media of the body are no part's: they stand where they are text.
    """
    by_text = dict(split.media_by_text())
    num_chars = 0
    for part in media:
        item = by_text.pop(part.url, None)
        if item is None:
            num_chars += len(part.url)
        elif part.is_base64 != (not item.head):
            raise RequestError(400, "invalid_value", f"{part.path} is not read so", part.path)
        else:
            part.url, part.content, part.content_digest = item.head, item.content, item.digest
            num_chars += item.num_chars
    if by_text:
        raise RequestError(400, "invalid_value", "the body has media in a place where none are read", None)
    return num_chars


def parse_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Parse `raw` as a JSON object. Raises RequestError: 400. The same below."""
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, "invalid_json", f"the body is not valid JSON: {error}"[:300], None) from error
    if not isinstance(fields, dict):
        raise RequestError(400, "invalid_json", "the body must be a JSON object", None)
    return fields


def validate_body(model: type[Body], fields: dict[str, Any]) -> Body:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = format_place(first["loc"])
        code = "missing_field" if first["type"] == "missing" else "invalid_value"
        raise RequestError(400, code, f"{path}: {first['msg']}", path) from error


def read_flag(text: str, name: str) -> bool:
    """Return a form's or a query's flag as vLLM reads it: "true" and "1" alike. Raises RequestError: 400."""
    try:
        return _FLAG.validate_python(text)
    except ValidationError as error:
        raise RequestError(400, "invalid_value", f"{name} must be true or false", name) from error


def passed_body(fields: dict[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """Return the fields that are passed on: without STRIPPED_FIELDS, but with the caller's own salt."""
    body = {name: value for name, value in fields.items() if name not in STRIPPED_FIELDS}
    return salted_body(body, caller_salt(fields.get(SALT_FIELD) or ""), endpoint)


def salted_body(body: dict[str, Any], salt: str, endpoint: Endpoint) -> dict[str, Any]:
    """Return `body` with `salt` before the salt that it has, where the endpoint computes."""
    if not salt or not endpoint.is_computed:
        return body
    return {**body, SALT_FIELD: salt + body.get(SALT_FIELD, "")}


def refuse_privileged(fields: dict[str, Any], endpoint: Endpoint) -> None:
    """Refuse fields that only gateway and engines may set, and those the endpoint does not take."""
    for name in REFUSED_FIELDS:
        if fields.get(name) is not None:
            raise RequestError(400, "field_not_allowed", f"{name} may not be set by callers", name)
    for name in (*REFUSED_FIELDS, SALT_FIELD):
        if name in (fields.get("vllm_xargs") or ()):
            path = f"vllm_xargs.{name}"
            raise RequestError(400, "field_not_allowed", f"{path} may not be set by callers", path)
    for name in endpoint.refused_fields:
        if fields.get(name) is not None:
            code = "embeds_not_allowed" if name == EMBEDS_FIELD else "field_not_allowed"
            raise RequestError(400, code, f"{name} may not be set by callers", name)
