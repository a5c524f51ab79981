"""Special tokens that stand for media in a rendered prompt may not come from the caller's text.

One more `<|image_pad|>` than there are images would put an image's embeddings in another's place,
or make the engine refuse the prompt. So it is a 400 that names where the token stands.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_gateway.content_parts import text_of

# Fields of the body that a chat template may render.
RENDERED_FIELDS = ("messages", "tools", "functions", "documents", "chat_template", "chat_template_kwargs")


class PlaceholderGuard:
    """Finds any of `tokens` in the text of a request."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tuple(tokens)

    def check(self, body: Mapping[str, Any], media_paths: frozenset[str]) -> None:
        """Look through everything that a template may render, except the media parts at `media_paths`.

        Raises:
            RequestError: 400, a token was found; `param` says where.
        """
        for path, text in _texts(body, media_paths):
            found = next((token for token in self._tokens if token in text), None)
            if found is not None:
                message = f"{path} contains {found!r}, a placeholder that only media parts may produce"
                raise RequestError(400, "placeholder_in_text", message, path)


def _texts(body: Mapping[str, Any], skip: frozenset[str]) -> Iterator[tuple[str, str]]:
    """(path, text) of every string and key. Iterative: a body may be nested deeply."""
    stack: list[tuple[str, Any]] = [(name, body[name]) for name in RENDERED_FIELDS if name in body]
    while stack:
        path, value = stack.pop()
        if path in skip:
            continue
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, dict):
            for key, child in value.items():
                yield path, key
                stack.append((f"{path}.{key}", child))
        elif isinstance(value, list):
            # A token split over neighbouring text parts is whole again once it is rendered.
            yield path, "".join(text_of(part) or "" for part in value)
            stack.extend((f"{path}[{index}]", child) for index, child in enumerate(value))
