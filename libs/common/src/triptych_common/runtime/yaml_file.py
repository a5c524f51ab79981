"""Read a YAML file that an operator has written, within a bound."""

from pathlib import Path
from typing import IO, Any

import yaml

from triptych_common.domain.errors import TriptychError

MAX_FILE_BYTES = 1 << 20


class YamlFileError(TriptychError):
    """The file cannot be read, is too large, or is no YAML. The text names it."""


def read_yaml_file(path: Path, name: str, *, max_bytes: int = MAX_FILE_BYTES) -> Any:
    """Return the content of `path`, called `name` in errors.

    Raises:
        YamlFileError: it cannot be read, is larger than `max_bytes`, or is no YAML: with the line, if known.
    """
    try:
        with path.open("rb") as file:
            return parse_yaml_file(file, name, max_bytes=max_bytes)
    except OSError as error:
        raise YamlFileError(f"{name} cannot be read: {error.strerror}") from error


def parse_yaml_file(file: IO[bytes], name: str, *, max_bytes: int = MAX_FILE_BYTES) -> Any:
    """Read an open file as `read_yaml_file` does. Raises OSError too."""
    text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise YamlFileError(f"{name} is larger than {max_bytes} bytes")
    try:
        return yaml.safe_load(text)
    except Exception as error:  # PyYAML raises errors of many kinds for values that it cannot make
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" (line {mark.line + 1})"
        raise YamlFileError(f"{name} is not valid YAML{place}") from None
