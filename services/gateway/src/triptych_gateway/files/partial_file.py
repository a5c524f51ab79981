"""File that is being written, under a name that holds its reserved bytes.

`.{token}.{bytes}.part`: other gateways count those bytes as used. Its writer holds a lock on it, which ends
with the process: a partial file without a lock was left over, and is removed by the next look.

Cancellation may close it while a thread still writes; so every step holds a lock of this process.
"""

import fcntl
import os
import re
import secrets
import threading
from io import FileIO
from pathlib import Path

from blake3 import blake3

from triptych_common.domain.errors import RequestError

PRIVATE = 0o600
CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
EXISTING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_NAME = re.compile(r"\.[0-9a-f]{32}\.(?P<bytes>[0-9]{1,18})\.part")


class ClosedFileError(OSError):
    """The upload has ended while a thread still wrote."""


class PartialFile:
    """File being written. Call its methods in threads; `discard` ends it in any state."""

    def __init__(self, folder: Path, num_reserved: int) -> None:
        """Make the file. The caller holds the directory's lock. Raises OSError: it cannot be made."""
        self.path = folder / f".{secrets.token_hex(16)}.{num_reserved}.part"
        self._num_reserved = num_reserved
        self._fd: int | None = os.open(self.path, CREATE, PRIVATE)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._lock = threading.Lock()
        self._hasher = blake3()
        self.num_bytes = 0

    @property
    def media_digest(self) -> str:
        """Digest of all bytes that were written (`domain.hashing.media_digest` of common)."""
        return self._hasher.hexdigest()

    def write(self, data: bytes) -> None:
        """Append `data`.

        Raises:
            RequestError: 413, more than was reserved.
            OSError: the disk, or `ClosedFileError`.
        """
        with self._lock:
            fd = self._open_fd()
            if self.num_bytes + len(data) > self._num_reserved:
                raise file_too_large(self._num_reserved)
            self._hasher.update(data)
            self.num_bytes += len(data)
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]

    def read(self) -> bytes:
        with self._lock:
            return read_all(self._open_fd(), self.num_bytes)

    def sync(self) -> None:
        with self._lock:
            os.fsync(self._open_fd())

    def keep_as(self, path: Path) -> None:
        """Give the complete file its lasting name, and close it."""
        with self._lock:
            fd = self._open_fd()
            self.path.rename(path)
            self._fd = None
            os.close(fd)

    def discard(self) -> None:
        """Remove the file, unless it was kept before. Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, None
            if fd is not None:
                self.path.unlink(missing_ok=True)
                os.close(fd)

    def _open_fd(self) -> int:
        if self._fd is None:
            raise ClosedFileError("the upload has ended")
        return self._fd


class OpenContent:
    """Bytes of a file while a client reads them. May be closed while a thread is about to read."""

    def __init__(self, fd: int) -> None:
        self._file = FileIO(fd)
        self._lock = threading.Lock()

    def read(self, max_bytes: int) -> bytes:
        """Return the next bytes; none at the end, or after `close`."""
        with self._lock:
            return b"" if self._file.closed else self._file.read(max_bytes)

    def close(self) -> None:
        with self._lock:
            self._file.close()


def file_too_large(max_bytes: int) -> RequestError:
    return RequestError(413, "file_too_large", f"the file is larger than {max_bytes} bytes", "file")


def reserved_bytes(name: str) -> int | None:
    """Return the bytes reserved by the partial file of this name; None for any other name."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found["bytes"])


def is_abandoned(path: Path) -> bool:
    """Return whether no living process writes the file. The caller holds the directory's lock."""
    try:
        fd = os.open(path, EXISTING)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def read_all(fd: int, num_bytes: int) -> bytes:
    """Return the first `num_bytes` of the file, or all of a shorter one."""
    content = os.pread(fd, num_bytes, 0)  # as a rule all of it: so there is no second copy
    while len(content) < num_bytes:
        piece = os.pread(fd, num_bytes - len(content), len(content))
        if not piece:
            break
        content += piece
    return content
