"""API keys: off, plain, hashed."""

import hashlib

import pytest
from pydantic import SecretStr

from tests.support.gateway.samples import sha256
from triptych_common.domain.errors import RequestError
from triptych_gateway.access.auth import ANONYMOUS, ApiKeyEntry, ApiKeys


def test_plain_and_hashed() -> None:
    keys = ApiKeys([SecretStr("one"), SecretStr("sha256:" + hashlib.sha256(b"two").hexdigest())])
    keys.check_key("Bearer one")
    keys.check_key("bearer two")
    for header in (None, "", "Bearer", "Bearer three", "Basic one"):
        with pytest.raises(RequestError) as caught:
            keys.check_key(header)
        assert caught.value.status_code == 401


def test_each_key_has_files_of_its_own() -> None:
    keys = ApiKeys(
        [SecretStr("one"), SecretStr("two")],
        [ApiKeyEntry(name=name, sha256=sha256(name), tenant=tenant) for name, tenant in NAMED],
    )
    names = ["one", "two", *(name for name, _ in NAMED)]
    owners = {name: keys.check_key(f"Bearer {name}").owner for name in names}
    assert len({*owners.values(), ANONYMOUS.owner}) == len(names) + 1
    for owner in owners.values():
        assert len(owner) == 32
        assert not [name for name in names if name in owner or sha256(name)[:8] in owner]
    exchanged = ApiKeys([], [ApiKeyEntry(name="alice", sha256=sha256("another key"), tenant="red")])
    assert exchanged.check_key("Bearer another key").owner == owners["alice"]
    elsewhere = ApiKeys([], [ApiKeyEntry(name="alice", sha256=sha256("alice"), tenant="blue")])
    assert elsewhere.check_key("Bearer alice").owner != owners["alice"]


NAMED = [("alice", "red"), ("anna", "red"), ("bob", "blue"), ("carol", None)]
