"""API keys: off, plain, hashed."""

import hashlib

import pytest
from pydantic import SecretStr

from triptych_common.domain.errors import RequestError
from triptych_gateway.access.auth import ApiKeys


def test_off_by_default() -> None:
    ApiKeys(()).check_key(None)


def test_plain_and_hashed() -> None:
    keys = ApiKeys([SecretStr("one"), SecretStr("sha256:" + hashlib.sha256(b"two").hexdigest())])
    keys.check_key("Bearer one")
    keys.check_key("bearer two")
    for header in (None, "", "Bearer", "Bearer three", "Basic one"):
        with pytest.raises(RequestError) as caught:
            keys.check_key(header)
        assert caught.value.status_code == 401
