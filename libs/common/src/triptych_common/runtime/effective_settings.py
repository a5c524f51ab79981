"""Text of `--print-config`: each setting's value and source, without secrets."""

import re
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import SecretStr
from pydantic_settings import BaseSettings

from triptych_common.runtime.config_file import names_of

_CREDENTIALS = re.compile(r"://[^/@\s\"]*@")  # of a URL
HIDDEN = "(hidden)"
DEFAULT = "default"


def effective_settings(settings: BaseSettings, sources: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each setting: `name = value  # origin`.

    Args:
        sources: settings of each source, by its name; the first that has a setting wins.
    """
    lines = []
    for name, field in type(settings).model_fields.items():
        names = names_of(name, field)
        origin = next((source for source, found in sources.items() if not names.isdisjoint(found)), DEFAULT)
        value = getattr(settings, name)
        is_hidden = _is_secret(value, is_shown=field.repr)
        shown = HIDDEN if is_hidden else orjson.dumps(value, default=_plain).decode()
        shown = _CREDENTIALS.sub("://***@", shown)
        lines.append(f"{name} = {shown}  # {origin}")
    return "\n".join(lines)


def _is_secret(value: Any, *, is_shown: bool) -> bool:
    return value is not None and (not is_shown or _has_secret(value))


def _has_secret(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return any(map(_has_secret, value))
    return isinstance(value, SecretStr)


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset | set):
        return sorted(value)
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if dump is not None else str(value)
