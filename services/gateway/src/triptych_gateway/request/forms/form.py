"""Form of a chat: the functions that read its body."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_gateway.endpoints.bodies import FormBody
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.forms.grammar_bounds import GrammarBounds
from triptych_gateway.request.json_bounds import BodyBounds

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on one body. Each guards the gateway's event loop, or prefill_decode's."""

    body: BodyBounds = field(default_factory=BodyBounds)
    max_messages: int = 2000  # vLLM keeps a dozen error objects for each that is faulty
    max_choices: int = 128  # each is a request of its own in prefill_decode's engine
    max_answer_tokens: int = 262_144  # of all choices together, where there are several
    max_logprobs: int = 250_000  # each is an object and a text on prefill_decode's event loop
    grammars: GrammarBounds = field(default_factory=GrammarBounds)


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
    """Add the media of one message.

    Raises:
        RequestError: 400, too many.
    """
    media += found
    if len(media) > max_items:
        fault = f"a request may hold {max_items} media items at most"
        raise RequestError(400, "too_many_items", fault, media[max_items].path)


def check_role(message: Fields, roles: frozenset[str], path: str) -> str:
    """Return the role of the message at `path`.

    Raises:
        RequestError: 400.
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(400, "missing_field", f"{path}.role must be a string", f"{path}.role")
    if role not in roles:
        raise RequestError(400, "unknown_role", f"{path}.role: unknown role {role[:50]!r}", f"{path}.role")
    return role


def not_beside_media(name: str) -> RequestError:
    return RequestError(400, "unsupported", f"{name} is not served together with media", name)
