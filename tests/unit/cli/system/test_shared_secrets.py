"""Files that the hosts share: made once, read by their user alone, refused where others could read them."""

import stat
from pathlib import Path

import pytest

from triptych_cli.system.shared_secrets import (
    KEY_FILE_NAME,
    URL_FILE_NAME,
    SharedSecretError,
    check_key,
    ensure_key,
    ensure_password,
    read_url,
    redis_config,
    socket_url,
    tcp_url,
    write_private,
)
from triptych_common.redis_client.address import RedisAddress


def mode_of(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_a_key_is_made_once_for_its_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "join" / KEY_FILE_NAME
    ensure_key(file)
    first = file.read_bytes()
    assert len(bytes.fromhex(first.decode())) == 32
    assert mode_of(file) == 0o600
    assert mode_of(file.parent) == 0o700
    ensure_key(file)
    assert file.read_bytes() == first


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / KEY_FILE_NAME
    ensure_key(file)
    file.chmod(0o640)
    with pytest.raises(SharedSecretError, match="chmod 600"):
        ensure_key(file)


@pytest.mark.parametrize("content", ["", "x" * 31, "x" * 31 + "\n"])
def test_a_short_key_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / KEY_FILE_NAME
    write_private(file, content)
    with pytest.raises(SharedSecretError, match="at least 32 bytes"):
        check_key(file)


def test_a_url_is_written_for_its_user_alone_and_read_again(tmp_path: Path) -> None:
    (tmp_path / URL_FILE_NAME).write_text("older, and longer than what follows it")
    (tmp_path / URL_FILE_NAME).chmod(0o644)
    write_private(tmp_path / URL_FILE_NAME, "redis://there\n")
    assert mode_of(tmp_path / URL_FILE_NAME) == 0o600
    assert read_url(tmp_path) == "redis://there"
    assert sorted(each.name for each in tmp_path.iterdir()) == [URL_FILE_NAME]


@pytest.mark.parametrize("address", ["192.0.2.1", "fd00::1"])
def test_the_password_stays_when_the_system_starts_again(tmp_path: Path, address: str) -> None:
    password = ensure_password(tmp_path, address, 6379)
    assert len(password) == 64
    assert ensure_password(tmp_path, address, 6379) != password, "nothing was kept yet"
    for kept in (password, "a/b@c:d%e"):
        write_private(tmp_path / URL_FILE_NAME, f"{tcp_url(address, 6379, kept)}\n")
        assert ensure_password(tmp_path, address, 6379) == kept


@pytest.mark.parametrize(
    "url",
    [
        "rediss://:theirs@192.0.2.1:6379/0",
        "redis://:theirs@192.0.2.9:6379/0",
        "redis://:theirs@192.0.2.1:6380/0",
        "redis://user:theirs@192.0.2.1:6379/0",
        "redis+sentinel://:theirs@192.0.2.1:6379/service",
        "redis://192.0.2.1:6379/0",
        "redis://:[@",
    ],
)
def test_the_password_of_another_redis_is_not_taken_over(tmp_path: Path, url: str) -> None:
    write_private(tmp_path / URL_FILE_NAME, f"{url}\n")
    password = ensure_password(tmp_path, "192.0.2.1", 6379)
    assert len(password) == 64
    assert password not in url


def test_a_password_is_one_word_for_redis() -> None:
    assert redis_config("f00d") == 'requirepass "f00d"\n'
    assert redis_config('a "\nü') == 'requirepass "a\\x20\\x22\\x0a\\xc3\\xbc"\n'


def test_urls_are_such_as_services_take() -> None:
    awkward = "a/b@c:d%e"
    options = RedisAddress.parse(tcp_url("fd00::1", 6380, awkward)).options
    assert (options["host"], options["port"], options["password"]) == ("fd00::1", 6380, awkward)
    options = RedisAddress.parse(socket_url(Path("/run/redis.sock"), awkward)).options
    assert (options["path"], options["password"]) == ("/run/redis.sock", awkward)
    assert socket_url(Path("/run/redis.sock"), None) == "unix:///run/redis.sock"
