"""The file of API keys: names, hashes, tenants; refused when malformed or open to others."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from tests.support.gateway.samples import entry, sha256
from triptych_common.domain.errors import RequestError, TriptychError
from triptych_common.domain.hashing import tenant_salt
from triptych_gateway.access import auth
from triptych_gateway.access.auth import ANONYMOUS, ApiKeys, ApiKeysFileError, Caller, read_api_keys_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    return path


def test_a_key_has_a_name_and_perhaps_a_tenant(path: Path) -> None:
    path.write_text(
        entry("alice", "one", "research") + entry("bob", "two", "research") + entry("carol", "three")
    )
    keys = ApiKeys([SecretStr("four")], read_api_keys_file(path))
    assert keys.check_key("Bearer one") == Caller("alice", "research")
    assert keys.check_key("Bearer two") == Caller("bob", "research")
    assert keys.check_key("Bearer three") == Caller("carol", None)
    assert keys.check_key("Bearer four") == ANONYMOUS
    for header in (None, "Bearer", "Bearer five", f"Bearer {sha256('one')}"):
        with pytest.raises(RequestError) as caught:
            keys.check_key(header)
        assert caught.value.status_code == 401


def test_capital_hex_digits_are_the_same_key(path: Path) -> None:
    path.write_text(f'[[keys]]\nname = "alice"\nsha256 = "{sha256("one").upper()}"\n')
    assert ApiKeys((), read_api_keys_file(path)).check_key("Bearer one").key_name == "alice"


def test_salts_are_of_the_tenant_alone() -> None:
    assert Caller("alice", "a").salt == Caller("bob", "a").salt == tenant_salt("a")
    names = ["a", "b", "A", "a.", "ab", "0" * 64, tenant_salt("a")]
    assert len({tenant_salt(name) for name in names}) == len(names)
    assert ANONYMOUS.salt == Caller("carol", None).salt == ""


def test_the_key_is_shown_nowhere(path: Path) -> None:
    path.write_text(entry("alice", "key-1", "research"))
    entries = read_api_keys_file(path)
    caller = ApiKeys((), entries).check_key("Bearer key-1")
    shown = f"{entries!r} {caller!r} {caller.fields}"
    assert "key-1" not in shown
    assert sha256("key-1") not in shown
    assert caller.fields == {"api_key_name": "alice", "tenant": "research"}


def test_a_key_in_the_settings_and_in_the_file_is_refused(path: Path) -> None:
    path.write_text(entry("alice", "one"))
    with pytest.raises(TriptychError, match="alice"):
        ApiKeys([SecretStr("one")], read_api_keys_file(path))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "keys = []",
        "keys",
        "\x00",
        '[[keys]]\nname = "alice"\n',
        f'[[keys]]\nsha256 = "{"0" * 64}"\n',
        '[[keys]]\nname = "alice"\nsha256 = "plain-secret-key"\n',
        entry("alice", "one", ""),
        entry("al ice", "one"),
        entry("alice", "one", "a/b"),
        entry("alice", "one") + "salt = 1\n",
        entry("alice", "one") + entry("alice", "two"),
        entry("alice", "one", "a") + entry("bob", "one", "b"),
        "other = 1\n" + entry("alice", "one"),
    ],
)
def test_a_malformed_file_is_refused_without_its_values(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ApiKeysFileError) as caught:
        read_api_keys_file(path)
    assert "plain-secret-key" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_file_that_is_not_open_to_all_is_read(path: Path, mode: int) -> None:
    path.write_text(entry("alice", "one"))
    path.chmod(mode)
    assert len(read_api_keys_file(path)) == 1


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602, 0o444])
def test_a_file_that_others_read_or_write_is_refused(path: Path, mode: int) -> None:
    path.write_text(entry("alice", "one"))
    path.chmod(mode)
    with pytest.raises(ApiKeysFileError, match=f"{mode:04o}"):
        read_api_keys_file(path)


def test_a_secret_of_a_container_may_be_readable(path: Path) -> None:
    path.write_text(entry("alice", "one"))
    path.chmod(0o444)
    assert len(read_api_keys_file(path, secrets_dir=path.parent)) == 1
    path.chmod(0o464)
    with pytest.raises(ApiKeysFileError, match="0464"):
        read_api_keys_file(path, secrets_dir=path.parent)


def test_a_link_out_of_the_secrets_counts_as_what_it_leads_to(path: Path, tmp_path: Path) -> None:
    path.write_text(entry("alice", "one"))
    path.chmod(0o444)
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "keys").symlink_to(path)
    with pytest.raises(ApiKeysFileError, match="0444"):
        read_api_keys_file(secrets / "keys", secrets_dir=secrets)


def test_a_file_that_is_none_or_huge_is_refused(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for missing in (tmp_path / "missing", tmp_path):
        with pytest.raises(ApiKeysFileError):
            read_api_keys_file(missing)
    path.write_text(entry("alice", "one"))
    monkeypatch.setattr(auth, "MAX_FILE_BYTES", 10)
    with pytest.raises(ApiKeysFileError, match="larger"):
        read_api_keys_file(path)
