"""One body for an endpoint."""

from dataclasses import dataclass, replace
from typing import Any

from tests.support.real.system import MODEL


@dataclass(frozen=True)
class Case:
    """`body` None: nothing is sent, by GET. A field that is None is not sent; `NULL` is sent as null."""

    path: str
    body: dict[str, Any] | None
    own_words: bool = False  # the gateway finds the fault itself, and says it in other words
    own_status: int | None = None  # the gateway's, where it is stricter than vLLM on purpose
    why: str = ""  # it is

    @property
    def sent(self) -> dict[str, Any] | None:
        """With the model, unless the body says otherwise."""
        if self.body is None:
            return None
        named = {"model": MODEL.name, **self.body}
        return {name: _sendable(value) for name, value in named.items() if value is not None}

    @property
    def streams(self) -> bool:
        return self.body is not None and bool(self.body.get("stream"))

    def streamed(self) -> "Case":
        """The same, as a stream that tells its usage."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return replace(self, body=options | (self.body or {}) | {"stream": True})


class _Null:
    """Sent as null."""

    def __repr__(self) -> str:
        return "null"


NULL: Any = _Null()


def _sendable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sendable(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(_sendable, value))
    return None if value is NULL else value


Table = dict[str, Case]


def table(
    path: str, bodies: dict[str, dict[str, Any]], /, common: dict[str, Any] | None = None, **known: Any
) -> Table:
    """Cases of one endpoint. `known`: of all of their answers."""
    return {
        f"{path}: {name}": Case(path, {**(common or {}), **body}, **known) for name, body in bodies.items()
    }


def with_streams(cases: Table) -> Table:
    """Each of them also as a stream."""
    return cases | {f"{name}, streamed": case.streamed() for name, case in cases.items()}
