"""Secrets that the hosts of one system share: the URL of Redis with its password, and the fabric's key.

The first host keeps them in a folder, each in a file that only its user can read:

    join/redis-url     redis://:PASSWORD@ADDRESS:6379/0
    join/fabric.key    32 random bytes, in hexadecimal

The folder is copied to the other hosts; `up --join FOLDER` reads it there. It stays when the system ends: the
others rejoin with what they have.
"""

import os
import secrets
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from triptych_common.runtime.secret_files import MIN_KEY_BYTES, SecretFileError, read_key, read_secret

KEY_FILE_NAME, URL_FILE_NAME = "fabric.key", "redis-url"
_MAX_FILE_BYTES = 64 << 10


class SharedSecretError(Exception):
    """A shared file is missing, or others can read it; the text names the remedy."""


def ensure_key(file: Path) -> None:
    """Create the key if there is none.

    Raises:
        SharedSecretError: there is one that cannot be used, or it cannot be made.
    """
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        check_key(file)
        return
    except OSError as error:
        raise SharedSecretError(f"the key {file} cannot be made: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as handle:
        handle.write(secrets.token_hex(MIN_KEY_BYTES) + "\n")


def check_key(file: Path) -> None:
    """Raise SharedSecretError if the agents would not accept the key."""
    try:
        read_key(file)
    except SecretFileError as error:
        raise SharedSecretError(str(error)) from None


def read_url(folder: Path) -> str:
    """URL of Redis in a folder `join`.

    Raises:
        SharedSecretError: the folder is none, or others can read it.
    """
    try:
        return read_secret(folder / URL_FILE_NAME, _MAX_FILE_BYTES).decode(errors="replace").strip()
    except SecretFileError as error:
        raise SharedSecretError(str(error)) from None


def write_private(file: Path, content: str) -> None:
    """Write atomically, readable by the owner only. Raises SharedSecretError: it cannot be written."""
    temporary = file.with_name(f"{file.name}.new")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as handle:
            handle.write(content)
        temporary.replace(file)
    except OSError as error:
        raise SharedSecretError(f"{file} cannot be written: {error.strerror}") from None


def ensure_password(folder: Path, address: str, port: int) -> str:
    """Password of the embedded Redis at `address`: the one in the folder's URL, else a new one.

    The URL of another Redis, which this host once used, does not count.
    """
    if not (folder / URL_FILE_NAME).exists():
        return secrets.token_hex(32)
    url = read_url(folder)
    try:
        password = unquote(urlsplit(url).password or "")
    except ValueError:
        password = ""
    is_own = bool(password) and url == tcp_url(address, port, password)
    return password if is_own else secrets.token_hex(32)


def redis_config(password: str) -> str:
    """Configuration file of the embedded Redis, with special characters escaped."""
    quoted = "".join(
        chr(byte) if chr(byte).isalnum() and byte < 128 else f"\\x{byte:02x}" for byte in password.encode()
    )
    return f'requirepass "{quoted}"\n'


def tcp_url(address: str, port: int, password: str) -> str:
    """URL at which other hosts reach the embedded Redis."""
    host = f"[{address}]" if ":" in address else address
    return f"redis://:{quote(password, safe='')}@{host}:{port}/0"


def socket_url(socket: Path, password: str | None) -> str:
    """URL at which this machine's services reach the embedded Redis."""
    login = f":{quote(password, safe='')}@" if password else ""
    return f"unix://{login}{socket}"
