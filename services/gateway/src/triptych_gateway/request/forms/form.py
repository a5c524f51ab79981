"""Form of a chat: the functions that read its body; the form of OpenAI's chat completions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_gateway.endpoints.endpoint import ChatBody, FormBody
from triptych_gateway.request.content_parts import MediaPart, find_media

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Form:
    """Functions that read one form; each raises RequestError (400) that names a fault's place."""

    body: type[FormBody]
    find_media: Callable[[Fields, int], tuple[MediaPart, ...]]
    """Function that finds a body's media, up to a number, in the order of the prompt."""
    check_choices: Callable[[FormBody, int], None]
    """Function that checks the number of choices."""
    check_beside_media: Callable[[Fields], None]
    """Function that refuses fields that cannot be combined with media."""
    joined_texts: Callable[[Fields], Iterator[tuple[str, str]]]
    """Function that yields texts that vLLM joins though they are apart, each with its path for errors."""


def add_media(media: list[MediaPart], found: list[MediaPart], max_items: int) -> None:
    """Add the media of one message. Raises RequestError: 400, too many."""
    media += found
    if len(media) > max_items:
        fault = f"a request may hold {max_items} media items at most"
        raise RequestError(400, "too_many_items", fault, media[max_items].path)


def check_role(message: Fields, roles: frozenset[str] | None, path: str) -> str:
    """Return the role of the message at `path`; `roles` None: any, which the model's template may refuse.

    Raises:
        RequestError: 400.
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(400, "missing_field", f"{path}.role must be a string", f"{path}.role")
    if roles is not None and role not in roles:
        raise RequestError(400, "unknown_role", f"{path}.role: unknown role {role[:50]!r}", f"{path}.role")
    return role


def not_beside_media(name: str) -> RequestError:
    return RequestError(400, "unsupported", f"{name} is not served together with media", name)


def _find_media(fields: Fields, max_items: int) -> tuple[MediaPart, ...]:
    media: list[MediaPart] = []
    for index, message in enumerate(fields["messages"]):
        path = f"messages[{index}]"
        role = check_role(message, None, path)
        content = message.get("content")
        if isinstance(content, list):
            found = find_media(("messages", index, "content"), content, len(media))
            add_media(media, list(found), max_items)
        elif content is not None and not isinstance(content, str):
            fault = f"{path}.content must be a string or a list of parts"
            raise RequestError(400, "invalid_type", fault, f"{path}.content")
        elif content is None and role != "assistant":
            raise RequestError(400, "missing_field", f"{path}.content is missing", f"{path}.content")
    return tuple(media)


def _check_choices(body: FormBody, max_choices: int) -> None:
    if isinstance(body, ChatBody) and (body.n or 0) > max_choices:
        raise RequestError(400, "invalid_value", f"n may be {max_choices} at most", "n")


def _check_beside_media(fields: Fields) -> None:
    if fields.get("use_beam_search"):
        raise not_beside_media("use_beam_search")
    # Cutting a prompt that is too long would cut placeholders off their items.
    if fields.get("truncate_prompt_tokens") is not None:
        raise not_beside_media("truncate_prompt_tokens")


def _joined_texts(fields: Fields) -> Iterator[tuple[str, str]]:
    """Yield nothing: only parts of one message are joined, and they stand side by side."""
    yield from ()


COMPLETIONS = Form(ChatBody, _find_media, _check_choices, _check_beside_media, _joined_texts)
