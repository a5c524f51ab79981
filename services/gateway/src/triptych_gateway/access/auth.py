"""Authentication by API keys, off unless the settings or a file have keys."""

import hashlib
import hmac
import re
from collections.abc import Sequence

from pydantic import SecretStr

from triptych_common.domain.errors import RequestError, TriptychError
from triptych_gateway.access.api_keys_file import ApiKeyEntry
from triptych_gateway.access.callers import ANONYMOUS, Caller

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
