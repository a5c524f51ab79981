"""Validation of a chat completion's body: what the gateway must know, and what callers may not say.

Everything else passes through to vLLM, which validates it again.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictBool, StrictStr, ValidationError

from triptych_common.domain.errors import RequestError
from triptych_gateway.content_parts import MediaPart, find_media
from triptych_gateway.placeholder_tokens import MAX_NODES, PlaceholderGuard, too_complex
from triptych_gateway.request_options import MEDIA_IO_FIELD, OPTIONS_FIELDS, PROCESSOR_FIELD, RequestOptions

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Set by the gateway and the engines alone. `cache_salt` is not dropped in silence: a caller that
# sets it counts on the isolation it stands for.
REFUSED_FIELDS = ("ec_transfer_params", "kv_transfer_params", "cache_salt")
# `request_id` is the gateway's; the processor options are in mm_hash and in the job, and would make
# vLLM rehash the item's uuid.
STRIPPED_FIELDS = (*REFUSED_FIELDS, "request_id", *OPTIONS_FIELDS)

NO_OPTIONS = RequestOptions()


class ChatBody(BaseModel):
    """The fields that the gateway reads. Unknown ones are kept for vLLM."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr = Field(min_length=1)
    messages: Annotated[list[dict[str, Any]], FailFast()] = Field(min_length=1)
    stream: StrictBool | None = None
    use_beam_search: StrictBool | None = None
    vllm_xargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class ChatRequest:
    """A valid request. The text of its media can be dropped once they were taken (`drop_text`)."""

    body: dict[str, Any]  # as sent, without STRIPPED_FIELDS; media parts still in place
    model: str
    stream: bool
    media: tuple[MediaPart, ...]
    processor_options: dict[str, Any]
    media_io_options: dict[str, dict[str, Any]]  # keyed by modality, as in vLLM

    def drop_text(self, part: MediaPart) -> None:
        """Let go of the text of a part whose bytes were taken; the part's place stays."""
        part.url = ""
        self.body["messages"][part.message_index]["content"][part.part_index] = None


def parse_chat_request(
    raw: bytes, guard: PlaceholderGuard, max_items: int, options: RequestOptions = NO_OPTIONS
) -> ChatRequest:
    """Validate one body. Takes a while for a large one: tens of milliseconds per MB of small values.

    Args:
        options: what the request may say to processor and media reader.

    Raises:
        RequestError: 400, `param` names the field.
    """
    fields = _parse_object(raw)
    body = _validate(fields)
    _refuse_privileged(fields)
    options.check(fields)
    media = _check_messages(body.messages, max_items)
    guard.check(fields, [body.messages[m.message_index]["content"][m.part_index] for m in media])
    if media and body.use_beam_search:
        raise RequestError(
            400, "unsupported", "use_beam_search is not served together with media", "use_beam_search"
        )
    return ChatRequest(
        body={name: value for name, value in fields.items() if name not in STRIPPED_FIELDS},
        model=body.model,
        stream=bool(body.stream),
        media=media,
        processor_options=fields.get(PROCESSOR_FIELD) or {},
        media_io_options={name: each for name, each in (fields.get(MEDIA_IO_FIELD) or {}).items() if each},
    )


def _parse_object(raw: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, "invalid_json", f"the body is not valid JSON: {error}"[:300], None) from error
    if not isinstance(fields, dict):
        raise RequestError(400, "invalid_json", "the body must be a JSON object", None)
    return fields


def _validate(fields: dict[str, Any]) -> ChatBody:
    try:
        return ChatBody.model_validate(fields)
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


def _refuse_privileged(fields: dict[str, Any]) -> None:
    for name in REFUSED_FIELDS:
        if fields.get(name) is not None:
            raise RequestError(400, "field_not_allowed", f"{name} may not be set by callers", name)
    for name in REFUSED_FIELDS:
        if name in (fields.get("vllm_xargs") or ()):
            path = f"vllm_xargs.{name}"
            raise RequestError(400, "field_not_allowed", f"{path} may not be set by callers", path)


def _check_messages(messages: list[dict[str, Any]], max_items: int) -> tuple[MediaPart, ...]:
    media: list[MediaPart] = []
    num_parts = len(messages)
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str):
            raise RequestError(400, "missing_field", f"{path}.role must be a string", f"{path}.role")
        if role not in ROLES:
            raise RequestError(
                400, "unknown_role", f"{path}.role: unknown role {role[:50]!r}", f"{path}.role"
            )
        content = message.get("content")
        if isinstance(content, list):
            num_parts += len(content)
            if num_parts > MAX_NODES:
                raise too_complex()
            media.extend(find_media(index, content, len(media)))
        elif content is not None and not isinstance(content, str):
            raise RequestError(
                400, "invalid_type", f"{path}.content must be a string or a list of parts", f"{path}.content"
            )
        elif content is None and role in ("system", "developer", "user"):
            raise RequestError(400, "missing_field", f"{path}.content is missing", f"{path}.content")
        if len(media) > max_items:
            raise RequestError(
                400,
                "too_many_items",
                f"a request may hold {max_items} media items at most",
                media[max_items].path,
            )
    return tuple(media)
