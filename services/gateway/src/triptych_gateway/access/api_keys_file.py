"""File of API keys: name and SHA-256 of each key, optionally tenant, limits, operator (TOML).

    [defaults]
    requests_per_minute = 600

    [[keys]]
    name = "alice"
    sha256 = "<64 hexadecimal digits>"
    tenant = "research"
    tokens_per_minute = 100_000

    [[keys]]
    name = "on-call"
    sha256 = "<64 hexadecimal digits>"
    operator = true

`key_limits` has all limits; a key has those of the defaults that it does not name itself. `api_keys_watch`
reads the file again when it changes. Keys must be long and random: a plain hash does not protect short ones.
"""

import os
import stat
import tomllib
from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from triptych_common.domain.errors import TriptychError
from triptych_gateway.access.key_limits import KeyLimits

MAX_FILE_BYTES = 1 << 20
SECRETS_DIR = Path("/run/secrets")
"""Folder where Docker mounts a container's secrets, readable by all of the container's users: Compose has no
option for it, and a container has no other users."""

PlainName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)]


class ApiKeysFileError(TriptychError):
    """The file of API keys cannot be used as it is."""


class ApiKeyEntry(KeyLimits):
    """Entry of the file: one API key and its limits."""

    name: PlainName
    sha256: Sha256 = Field(repr=False)
    tenant: PlainName | None = None
    operator: Annotated[bool, Field(strict=True)] = False
    """The page at `/ui` shows this key the requests of all keys, and the system's state."""

    @property
    def limits(self) -> KeyLimits | None:
        """Limits of the key; None without any."""
        limits = KeyLimits(**{name: getattr(self, name) for name in KeyLimits.model_fields})
        return None if limits == KeyLimits() else limits


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    defaults: KeyLimits = KeyLimits()
    keys: tuple[ApiKeyEntry, ...] = Field(min_length=1)


def read_api_keys_file(path: Path, secrets_dir: Path = SECRETS_DIR) -> tuple[ApiKeyEntry, ...]:
    """Return the keys of `path` with their limits, all names and all keys different.

    Raises:
        ApiKeysFileError: it is missing, malformed, or open to users that must neither read nor write it.
    """
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            _check_access(path, info, may_be_read=path.resolve().is_relative_to(secrets_dir))
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ApiKeysFileError(f"the file of API keys {path} cannot be read: {error.strerror}") from error
    if len(text) > MAX_FILE_BYTES:
        raise ApiKeysFileError(f"the file of API keys {path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        content = _File.model_validate(tomllib.loads(text.decode()))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise ApiKeysFileError(f"the file of API keys {path}: {place}: {fault['msg']}") from None
    except (ValueError, RecursionError) as error:  # TOML that is none, or absurd
        raise ApiKeysFileError(f"the file of API keys {path} is not valid TOML") from error
    _check_unique(path, content.keys)
    return tuple(key.or_else(content.defaults) for key in content.keys)


def _check_access(path: Path, info: os.stat_result, *, may_be_read: bool) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise ApiKeysFileError(f"the file of API keys {path} is not a regular file")
    forbidden = stat.S_IWGRP | stat.S_IWOTH | (0 if may_be_read else stat.S_IROTH)
    if info.st_mode & forbidden:
        mode = stat.S_IMODE(info.st_mode)
        raise ApiKeysFileError(f"the file of API keys {path} has mode {mode:04o}; make it 0600 or 0640")


def _check_unique(path: Path, keys: tuple[ApiKeyEntry, ...]) -> None:
    names, digests = Counter(key.name for key in keys), Counter(key.sha256 for key in keys)
    twice = [key.name for key in keys if names[key.name] > 1 or digests[key.sha256] > 1]
    if twice:
        raise ApiKeysFileError(f"the file of API keys {path} has a name or a key twice: {', '.join(twice)}")
