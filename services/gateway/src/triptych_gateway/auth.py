"""API keys. Off unless keys are set."""

import hashlib
import hmac
import re
from collections.abc import Sequence

from pydantic import SecretStr

from triptych_common.domain.errors import RequestError

_SHA256 = re.compile(r"sha256:(?P<hex>[0-9a-fA-F]{64})")


class ApiKeys:
    """Holds digests only. Compares with all of them, each in constant time."""

    def __init__(self, keys: Sequence[SecretStr]) -> None:
        self._digests = [_digest_of_setting(key.get_secret_value()) for key in keys]

    def check(self, authorization: str | None) -> None:
        """`authorization` is the request's header.

        Raises:
            RequestError: 401.
        """
        if not self._digests:
            return
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise RequestError(401, "missing_api_key", "send an API key: Authorization: Bearer <key>")
        presented = _digest(token.strip())
        matches = [hmac.compare_digest(presented, known) for known in self._digests]  # all: no early end
        if not any(matches):
            raise RequestError(401, "invalid_api_key", "the API key is not valid")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def _digest_of_setting(setting: str) -> str:
    hashed = _SHA256.fullmatch(setting)
    return hashed["hex"].lower() if hashed else _digest(setting)
