"""Places in a body: the keys and indices that lead to a value, from the outside.

("messages", 0, "content", 2)    messages[0].content[2]
"""

from collections.abc import Iterable, Iterator
from typing import Any

Place = tuple[str | int, ...]


def format_place(place: Place) -> str:
    """Format ('messages', 0, 'role') as 'messages[0].role'."""
    path = ""
    for step in place:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def value_at(body: Any, place: Place) -> Any:
    """Return the value at a place, which must exist; the same below."""
    for step in place:
        body = body[step]
    return body


def put_at(body: Any, place: Place, value: Any) -> None:
    """Replace the value at a place in the body itself."""
    value_at(body, place[:-1])[place[-1]] = value


def replace_at(body: dict[str, Any], values: Iterable[tuple[Place, Any]]) -> dict[str, Any]:
    """Return a copy of the body with these values; only containers on the paths to them are copied."""
    copies: dict[Place, Any] = {(): dict(body)}
    for place, value in values:
        for depth in range(1, len(place)):
            holder, step = copies[place[: depth - 1]], place[depth - 1]
            if place[:depth] not in copies:
                copies[place[:depth]] = holder[step] = holder[step].copy()
        copies[place[:-1]][place[-1]] = value
    return copies[()]  # type: ignore[no-any-return]


def lists_before(body: Any, place: Place) -> Iterator[list[Any]]:
    """Yield the elements before the place in each list that leads to it, from the outside."""
    for step in place:
        if isinstance(step, int):
            yield body[:step]
        body = body[step]
