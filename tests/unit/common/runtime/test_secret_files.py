"""Secrets are read where nobody else can read them; a key is the bytes of its file."""

import os
from pathlib import Path

import pytest

from triptych_common.runtime.secret_files import (
    MAX_KEY_BYTES,
    MIN_KEY_BYTES,
    SecretFileError,
    read_key,
    read_secret,
)


def file_with(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (b"k" * 32, b"k" * 32),
        (b"k" * 32 + b"\n", b"k" * 32),
        (b" \t" + b"k" * 28 + b"\r ", b" \t" + b"k" * 28 + b"\r "),  # random bytes, as they are
        (b"k" * 31 + b"\n\n", b"k" * 31 + b"\n"),
        (b"k" * MAX_KEY_BYTES + b"\n", b"k" * MAX_KEY_BYTES),
    ],
)
def test_a_key_is_what_the_file_has_without_one_newline(tmp_path: Path, content: bytes, key: bytes) -> None:
    assert read_key(file_with(tmp_path / "key", content)) == key


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "too short"),
        (b"k" * (MIN_KEY_BYTES - 1) + b"\n", "too short"),
        (b"k" * (MAX_KEY_BYTES + 1), "too long"),
        (b"k" * MAX_KEY_BYTES + b"\n\n", "too long"),
    ],
)
def test_keys_of_another_length_are_refused(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(SecretFileError, match=why):
        read_key(file_with(tmp_path / "key", content))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o602])
def test_what_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(SecretFileError, match="chmod 600"):
        read_secret(file_with(tmp_path / "secret", b"s", mode), 10)


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    assert read_secret(file_with(tmp_path / "secret", b"secret"), 3) == b"sec"


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(SecretFileError, match=f"{os.fspath(path)} cannot be read"):
            read_secret(path, 10)
