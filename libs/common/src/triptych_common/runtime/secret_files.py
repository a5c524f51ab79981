"""Files with a secret that an operator has made: read by their owner alone, and bounded.

A fabric agent reads its key by `read_key`, and the command line checks it beforehand in the same way.
"""

import os
import stat
from pathlib import Path

from triptych_common.domain.errors import TriptychError

MIN_KEY_BYTES = 32
MAX_KEY_BYTES = 4096


class SecretFileError(TriptychError):
    """The file is missing, others can read it, or its content cannot be used; the text names the remedy."""


def read_secret(file: Path, max_bytes: int) -> bytes:
    """Return the first `max_bytes` of a file that only its owner can read.

    Raises:
        SecretFileError: it cannot be read, or is open to others.
    """
    try:
        with file.open("rb") as handle:
            mode = os.fstat(handle.fileno()).st_mode
            content = handle.read(max_bytes)
    except OSError as error:
        raise SecretFileError(f"{file} cannot be read: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise SecretFileError(f"other users can read {file}; make it so: chmod 600 {file}")
    return content


def read_key(file: Path) -> bytes:
    """Return a key: the bytes of the file, without one newline at the end.

    Raises:
        SecretFileError: it cannot be read, is open to others, or is too short or too long.
    """
    key = read_secret(file, MAX_KEY_BYTES + 2).removesuffix(b"\n")
    if len(key) < MIN_KEY_BYTES:
        raise SecretFileError(f"the key {file} is too short: it needs at least {MIN_KEY_BYTES} bytes")
    if len(key) > MAX_KEY_BYTES:
        raise SecretFileError(f"the key {file} is too long: it may have {MAX_KEY_BYTES} bytes at most")
    return key
