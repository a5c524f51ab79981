"""API keys of callers, from the settings and from a TOML file that may change; the caller of a key.

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

`key_limits` has all limits; a key has those of the defaults that it does not name itself. `changed_file`
reads the file again when it changes. Keys must be long and random: a plain hash does not protect short ones.
"""

import hashlib
import hmac
import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, ValidationError

from triptych_common.domain.errors import RequestError, TriptychError
from triptych_common.domain.hashing import owner_id, tenant_salt
from triptych_gateway.access.key_limits import KeyLimits
from triptych_gateway.errors import first_fault


@dataclass(frozen=True, slots=True)
class Caller:
    """One API key without the key. Callers without a tenant share everything with each other."""

    key_name: str | None = None  # None: no authentication, or a key of the setting `api_keys`
    tenant: str | None = None
    key_digest: str | None = field(default=None, compare=False, repr=False)  # of a key that has no name
    limits: KeyLimits | None = field(default=None, compare=False, repr=False)
    is_operator: bool = field(default=False, compare=False)  # may see what all callers do, at `/ui`

    @property
    def owner(self) -> str:
        """Owner id of the caller's uploaded files: that of one API key, whatever its tenant.

        Without authentication all callers have the same.
        """
        return owner_id(tenant=self.tenant, key_name=self.key_name, key_digest=self.key_digest)

    @property
    def flow(self) -> str:
        """Flow of the caller's encode jobs: its tenant's, or else its key's; contains neither name."""
        if self.tenant is None:
            return self.owner
        return owner_id(tenant=self.tenant, key_name=None, key_digest=None)

    @property
    def salt(self) -> str:
        """Part of the identity of all that the caller's requests leave in a cache; "" means shared."""
        return "" if self.tenant is None else tenant_salt(self.tenant)

    def may_use(self, model: str) -> bool:
        return self.limits is None or self.limits.allows_model(model)

    def sees_as(self, other: "Caller") -> bool:
        """Return whether `/ui` shows both the same; `==` leaves out rights and limits."""
        mine, theirs = (self.owner, self.is_operator), (other.owner, other.is_operator)
        return mine == theirs and self.models == other.models

    @property
    def models(self) -> frozenset[str] | None:
        """Models that the caller may use; None for all."""
        return None if self.limits is None or self.limits.models is None else frozenset(self.limits.models)

    @property
    def fields(self) -> dict[str, str]:
        """Names of key and tenant, as fields for logs and spans."""
        fields = {"api_key_name": self.key_name, "tenant": self.tenant}
        return {name: value for name, value in fields.items() if value is not None}


ANONYMOUS = Caller(is_operator=True)  # without authentication nothing is anybody's own


MAX_FILE_BYTES = 1 << 20
SECRETS_DIR = Path("/run/secrets")
"""Folder where Docker mounts a container's secrets, readable by all of the container's users: Compose has no
option for it, and a container has no other users."""

PlainName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)]


class ApiKeysFileError(TriptychError):
    """The file of API keys cannot be used as it is."""


class ApiKeyEntry(KeyLimits):
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
        raise ApiKeysFileError(f"the file of API keys {path}: {first_fault(error)}") from None
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


_SHA256 = re.compile(r"sha256:(?P<hex>[0-9a-fA-F]{64})")


class ApiKeys:
    """Digests of the API keys; each check compares with all of them in constant time.

    Args:
        keys: keys from the settings, without name and tenant.
        entries: keys from the file.

    Raises:
        TriptychError: one key stands in both: its tenant would be ambiguous.
    """

    def __init__(self, keys: Sequence[SecretStr], entries: Sequence[ApiKeyEntry] = ()) -> None:
        digests = [_digest_of_setting(key.get_secret_value()) for key in keys]
        self._plain = {digest: Caller(key_digest=digest) for digest in digests}
        self._callers = self._plain
        self.replace_entries(entries)

    def replace_entries(self, entries: Sequence[ApiKeyEntry]) -> None:
        """Replace the keys of the file; requests that were admitted go on.

        Raises:
            TriptychError: a key is in both; the former keys stay.
        """
        for entry in entries:
            if entry.sha256 in self._plain:
                raise TriptychError(f"the API key {entry.name} is in both api_keys and api_keys_file")
        named = {
            entry.sha256: Caller(entry.name, entry.tenant, limits=entry.limits, is_operator=entry.operator)
            for entry in entries
        }
        self._callers = self._plain | named

    def check_key(self, authorization: str | None, plain_key: str | None = None) -> Caller:
        """Return the caller whose key the request shows.

        Args:
            authorization: the header of this name.
            plain_key: key of another header, read if there is no bearer token.

        Raises:
            RequestError: 401.
        """
        if not self._callers:
            return ANONYMOUS
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            token = plain_key or ""
        if not token:
            raise RequestError(401, "missing_api_key", "send an API key: Authorization: Bearer <key>")
        presented = _digest(token.strip())
        matches = [
            caller for known, caller in self._callers.items() if hmac.compare_digest(presented, known)
        ]  # all: no early end
        if not matches:
            raise RequestError(401, "invalid_api_key", "the API key is not valid")
        return matches[0]


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def _digest_of_setting(setting: str) -> str:
    hashed = _SHA256.fullmatch(setting)
    return hashed["hex"].lower() if hashed else _digest(setting)
