"""Validation of a chat completion's body: what the gateway must know, and what callers may not send.

Everything else passes through to vLLM, which validates it again.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from triptych_common.domain.errors import RequestError
from triptych_gateway.endpoints.bodies import ChatBody
from triptych_gateway.request.content_parts import MediaPart, find_media
from triptych_gateway.request.json_bounds import BodyBounds, check_bounds, prompt_too_large
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard
from triptych_gateway.request.request_options import (
    MEDIA_IO_FIELD,
    OPTIONS_FIELDS,
    PROCESSOR_FIELD,
    RequestOptions,
)
from triptych_gateway.request.split.split_body import SplitBody

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Set by the gateway and the engines alone. `cache_salt` is refused, not dropped: a caller that
# sets it counts on the isolation it stands for.
REFUSED_FIELDS = ("ec_transfer_params", "kv_transfer_params", "cache_salt")
# `request_id` is the gateway's; the processor options are in mm_hash and in the job, and would make
# vLLM rehash the item's uuid.
STRIPPED_FIELDS = (*REFUSED_FIELDS, "request_id", *OPTIONS_FIELDS)

NO_OPTIONS = RequestOptions()
PARSE_INLINE_BYTES = 32 << 10
Parsed = TypeVar("Parsed")
Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on one body. Each guards the gateway's event loop, or prefill_decode's."""

    body: BodyBounds = field(default_factory=BodyBounds)
    max_messages: int = 2000  # vLLM keeps a dozen error objects for each that is faulty
    max_choices: int = 128  # each is a request of its own in prefill_decode's engine


DEFAULT_LIMITS = RequestLimits()


@dataclass(frozen=True)
class ChatRequest:
    """A valid request. The text of its media can be dropped once they were taken (`drop_text`)."""

    body: dict[str, Any]  # as sent, without STRIPPED_FIELDS, with the tenant's salt; media parts in place
    model: str
    stream: bool
    media: tuple[MediaPart, ...]
    processor_options: dict[str, Any]
    media_io_options: dict[str, dict[str, Any]]  # keyed by modality, as in vLLM
    num_prompt_bytes: int = 0  # of the body as sent, without the text of its media
    tenant_salt: str = ""
    checked_tokens: frozenset[str] = frozenset()  # that its text does not contain

    @property
    def num_media_bytes(self) -> int:
        """Of the media that the body holds."""
        return sum(part.num_sent_bytes for part in self.media)

    def check_placeholders(self, tokens: Iterable[str]) -> None:
        """That its text contains none of `tokens`, which its instance announces. As a rule that is known.

        Raises:
            RequestError: 400.
        """
        unchecked = frozenset(tokens) - self.checked_tokens
        if unchecked:  # no instance was known when it was parsed
            PlaceholderGuard(tuple(unchecked)).check_texts(self.body, ())

    def of_tenant(self, salt: str) -> "ChatRequest":
        """The request with its tenant's salt in what is forwarded; "" for callers without a tenant."""
        return replace(self, tenant_salt=salt, body={**self.body, "cache_salt": salt}) if salt else self

    def drop_text(self, part: MediaPart) -> None:
        """Drop the text of a part whose bytes were taken; the part's place stays."""
        part.url, part.content = "", None
        self.body["messages"][part.message_index]["content"][part.part_index] = None


def parse_chat_request(
    raw: bytes | bytearray,
    guard: PlaceholderGuard,
    max_items: int,
    limits: RequestLimits = DEFAULT_LIMITS,
    options: RequestOptions = NO_OPTIONS,
    split: SplitBody | None = None,
) -> ChatRequest:
    """Validate one body. Takes a while for a large one: tens of milliseconds.

    Args:
        options: those that the request may set for processor and media reader.
        split: the body whose text `raw` is; None: `raw` is the body as it was sent.

    Raises:
        RequestError: 400, `param` names the field; 413 too much text.
    """
    check_bounds(raw, limits.body)
    fields = parse_object(raw)
    body = validate_body(ChatBody, fields)
    refuse_privileged(fields)
    options.check_options(fields)
    _check_numbers(body, limits)
    media = _check_messages(body.messages, max_items)
    num_media_chars = sum(len(part.url) for part in media) if split is None else _take_split(media, split)
    num_prompt_bytes = (len(raw) if split is None else split.num_bytes) - num_media_chars
    if num_prompt_bytes > limits.body.max_prompt_bytes:  # text that begins like media, and is none
        raise prompt_too_large(limits.body.max_prompt_bytes)
    guard.check_texts(fields, [body.messages[m.message_index]["content"][m.part_index] for m in media])
    if media:
        _check_options_beside_media(body, fields)
    return ChatRequest(
        body={name: value for name, value in fields.items() if name not in STRIPPED_FIELDS},
        model=body.model,
        stream=bool(body.stream),
        media=media,
        processor_options=fields.get(PROCESSOR_FIELD) or {},
        media_io_options={name: each for name, each in (fields.get(MEDIA_IO_FIELD) or {}).items() if each},
        num_prompt_bytes=num_prompt_bytes,
        checked_tokens=guard.tokens_of(body.model),
    )


@dataclass(frozen=True, slots=True)
class RequestParser:
    """`parse_chat_request` with a gateway's bounds; of large bodies in a thread: the event loop goes on."""

    guard: PlaceholderGuard
    max_items: int
    limits: RequestLimits
    options: RequestOptions
    threads: Executor

    async def parse(self, body: SplitBody, on_growth: Callable[[int], None]) -> ChatRequest:
        """The request of `body`, which is empty then.

        Args:
            on_growth: called with the number of bytes before so many are held; may raise.
        """
        if body.num_media and not body.is_odd:
            request = await run_parse(self.threads, len(body.text), partial(self._try_split, body))
            if request is not None:
                return request
        on_growth(body.num_bytes)
        return await run_parse(self.threads, body.num_bytes, lambda: self._parse(body.put_back()))

    def _try_split(self, body: SplitBody) -> ChatRequest | None:
        """None: it must be read whole."""
        try:
            return self._parse(body.text, body)
        except RequestError:
            return None  # reading it whole finds the same fault, and tells it in terms of what was sent

    def _parse(self, raw: bytearray, split: SplitBody | None = None) -> ChatRequest:
        return parse_chat_request(raw, self.guard, self.max_items, self.limits, self.options, split)


async def run_parse(threads: Executor, num_bytes: int, parse: Callable[[], Parsed]) -> Parsed:
    """Run `parse`, of so many bytes: at once when they are few, else in a thread."""
    if num_bytes <= PARSE_INLINE_BYTES:
        return parse()
    return await asyncio.get_running_loop().run_in_executor(threads, parse)


def _take_split(media: tuple[MediaPart, ...], split: SplitBody) -> int:
    """Give each part its bytes. Returns how many characters the body has in their places.

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
        raise RequestError(400, "invalid_value", "media stand where no media are read", None)
    return num_chars


def _check_numbers(body: ChatBody, limits: RequestLimits) -> None:
    if len(body.messages) > limits.max_messages:
        message = f"messages holds more than {limits.max_messages}"
        raise RequestError(400, "invalid_value", message, "messages")
    if body.n is not None and body.n > limits.max_choices:
        raise RequestError(400, "invalid_value", f"n may be {limits.max_choices} at most", "n")


def _check_options_beside_media(body: ChatBody, fields: dict[str, Any]) -> None:
    if body.use_beam_search:
        raise _not_beside_media("use_beam_search")
    # Cutting a prompt that is too long would cut placeholders off their items.
    if fields.get("truncate_prompt_tokens") is not None:
        raise _not_beside_media("truncate_prompt_tokens")
    template_options = fields.get("chat_template_kwargs")
    if isinstance(template_options, dict):
        for name in ("truncation", "max_length"):  # vLLM hands them to the tokenizer
            if template_options.get(name) is not None:
                raise _not_beside_media(f"chat_template_kwargs.{name}")


def _not_beside_media(name: str) -> RequestError:
    return RequestError(400, "unsupported", f"{name} is not served together with media", name)


def parse_object(raw: bytes | bytearray) -> dict[str, Any]:
    """The JSON object that `raw` is.

    Raises:
        RequestError: 400. Likewise below.
    """
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, "invalid_json", f"the body is not valid JSON: {error}"[:300], None) from error
    if not isinstance(fields, dict):
        raise RequestError(400, "invalid_json", "the body must be a JSON object", None)
    return fields


def validate_body(model: type[Body], fields: dict[str, Any]) -> Body:
    """The fields that the gateway reads."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = format_path(first["loc"])
        code = "missing_field" if first["type"] == "missing" else "invalid_value"
        raise RequestError(400, code, f"{path}: {first['msg']}", path) from error


def format_path(location: tuple[int | str, ...]) -> str:
    """('messages', 0, 'role') -> 'messages[0].role'."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def refuse_privileged(fields: dict[str, Any]) -> None:
    """Refuse what the gateway and the engines alone may set."""
    for name in REFUSED_FIELDS:
        if fields.get(name) is not None:
            raise RequestError(400, "field_not_allowed", f"{name} may not be set by callers", name)
    for name in REFUSED_FIELDS:
        if name in (fields.get("vllm_xargs") or ()):
            path = f"vllm_xargs.{name}"
            raise RequestError(400, "field_not_allowed", f"{path} may not be set by callers", path)


def _check_messages(messages: list[dict[str, Any]], max_items: int) -> tuple[MediaPart, ...]:
    media: list[MediaPart] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str):
            raise RequestError(400, "missing_field", f"{path}.role must be a string", f"{path}.role")
        if role not in ROLES:
            fault = f"{path}.role: unknown role {role[:50]!r}"
            raise RequestError(400, "unknown_role", fault, f"{path}.role")
        content = message.get("content")
        if isinstance(content, list):
            media.extend(find_media(index, content, len(media)))
        elif content is not None and not isinstance(content, str):
            fault = f"{path}.content must be a string or a list of parts"
            raise RequestError(400, "invalid_type", fault, f"{path}.content")
        elif content is None and role in ("system", "developer", "user"):
            raise RequestError(400, "missing_field", f"{path}.content is missing", f"{path}.content")
        if len(media) > max_items:
            fault = f"a request may hold {max_items} media items at most"
            raise RequestError(400, "too_many_items", fault, media[max_items].path)
    return tuple(media)
