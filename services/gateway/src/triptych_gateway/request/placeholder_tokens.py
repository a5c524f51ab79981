"""Placeholder tokens, which stand for media in a rendered prompt, are refused in a caller's text.

One more `<|image_pad|>` than there are images would put an image's embeddings in another's place,
or make the engine refuse the prompt. So it is a 400 that names where the token stands.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_gateway.request.body_bounds import MAX_DEPTH, count_values, too_complex
from triptych_gateway.request.content_parts import text_of
from triptych_gateway.settings import RequestSettings

# Fields of the body that a chat template may render.
RENDERED_FIELDS = ("messages", "tools", "functions", "documents", "chat_template_kwargs")
# vLLM parses this field of a tool call before it renders it, so JSON's escapes hide nothing there.
PARSED_FIELD = "arguments"
# vLLM cuts the line that such a text of a system prompt begins with, or leaves the text out.
BILLING_HEADER = "x-anthropic-billing-header"
_MAX_PATH_CHARS = 300

# Where a value stands: its own step and its parent's place. Written out only when something is found.
Place = tuple["Place | None", str | int]


class PlaceholderGuard:
    """Guard that finds the tokens of a request's model in its text.

    Args:
        tokens: tokens of every model.
        max_values: values in the rendered fields, with those parsed out of their strings.
        announced: tokens that a model's instances announce.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        max_values: int = RequestSettings().max_body_values,
        announced: Callable[[str], Collection[str]] = lambda model: (),
    ) -> None:
        self._tokens = tuple(tokens)
        self._max_values = max_values
        self._announced = announced

    def tokens_of(self, model: str) -> frozenset[str]:
        """Return the tokens to find in requests for `model` now: its instances may be unknown yet."""
        return frozenset((*self._tokens, *self._announced(model)))

    def check_texts(
        self, body: Mapping[str, Any], media_parts: Sequence[Mapping[str, Any]], inputs: Sequence[str] = ()
    ) -> None:
        """Search everything that a template may render, except `media_parts` (parts of `body`).

        `inputs`: fields beside those, which the model reads. Takes time and memory in proportion to the body.

        Raises:
            RequestError: 400: a token was found, `param` is the place; or too many values, or too deep.
        """
        tokens = self.tokens_of(str(body.get("model")))
        for place, text in _texts(body, inputs, {id(part) for part in media_parts}, self._max_values):
            for token in tokens:
                if token in text:
                    raise _found(token, format_place(place))

    def check_joined(self, model: str, texts: Iterable[tuple[str, str]]) -> None:
        """Search texts that vLLM makes from a body's for `model`, each with its path.

        Raises:
            RequestError: as `check_texts`.
        """
        tokens = self.tokens_of(model)
        for path, text in texts:
            for token in tokens:
                if token in text:
                    raise _found(token, path)


def _found(token: str, path: str) -> RequestError:
    message = f"{path} contains {token!r}, a placeholder that only media parts may produce"
    return RequestError(400, "placeholder_in_text", message, path)


def _texts(
    body: Mapping[str, Any], inputs: Sequence[str], skip: set[int], max_values: int
) -> Iterator[tuple[Place, str]]:
    """Yield every string and key with its place, iteratively, since a body may be nested deeply."""
    stack: list[tuple[Place, int, Any]] = [
        ((None, name), 1, body[name])
        for name in dict.fromkeys((*RENDERED_FIELDS, *inputs))
        if isinstance(body.get(name), (str, dict, list))
    ]
    num_nodes = 0
    while stack:
        place, depth, value = stack.pop()
        if isinstance(value, str):
            yield place, value
            continue
        if id(value) in skip:
            continue
        num_nodes += len(value)
        if num_nodes > max_values or depth > MAX_DEPTH:
            raise too_complex(max_values)
        if isinstance(value, dict):
            for key, child in value.items():
                yield place, key
                if isinstance(child, (str, dict, list)):
                    stack.append(((place, key), depth + 1, child))
                if key == PARSED_FIELD and isinstance(child, str):
                    parsed = _parse(child, max_values)
                    if isinstance(parsed, (str, dict, list)):
                        stack.append(((place, key), depth + 1, parsed))
        else:
            # A token split over neighbouring text parts is whole again once it is rendered.
            texts = [text_of(part) or "" for part in value]
            yield place, "".join(texts)
            if any(text.startswith(BILLING_HEADER) for text in texts):
                yield place, "".join(map(_without_header, texts))
            stack.extend(
                ((place, index), depth + 1, child)
                for index, child in enumerate(value)
                if isinstance(child, (str, dict, list))
            )


def _without_header(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_HEADER) else text


def _parse(text: str, max_values: int) -> Any:
    """Parse as vLLM does, with the same parser; None for text that it refuses."""
    try:
        count_values(text.encode(), max_values)
        return json.loads(text)
    except ValueError:
        return None
    except RecursionError as error:
        raise too_complex(max_values) from error


def format_place(place: Place) -> str:
    """Format ((None, 'messages'), 0) as 'messages[0]'; cut where it is very long."""
    steps: list[str] = []
    link: Place | None = place
    while link is not None:
        link, step = link
        dot = "." if link is not None else ""
        steps.append(f"[{step}]" if isinstance(step, int) else f"{dot}{step[:_MAX_PATH_CHARS]}")
    return "".join(reversed(steps))[:_MAX_PATH_CHARS]
