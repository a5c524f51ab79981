"""`file://` URLs below one root that an operator names. No link is followed below it, and none is raced.

Each part of the path is opened in the folder that was opened before it, and refused where it is a link. The
last one is checked through its own descriptor: a regular file, of bounded size.
"""

import io
import os
import re
import stat
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import unquote_to_bytes

from triptych_common.domain.transient import is_transient
from triptych_gateway.fetch.failures import (
    ContentTooLargeError,
    FetchError,
    MalformedUrlError,
    NoResourcesError,
    ServerRefusedError,
    UrlRefusedError,
)
from triptych_gateway.fetch.rules.urls import CONTROL, MAX_URL_CHARS

_URL = re.compile(r"file://(?P<host>[^/?#]*)(?P<path>/[^?#]*)", re.IGNORECASE)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a FIFO does not block
READ_BYTES = 1 << 20
MAX_NAMES = 64


@dataclass(frozen=True, slots=True)
class LocalFile:
    """File below the root, by the names that lead to it."""

    names: tuple[str, ...] = field(repr=False)


class LocalFiles:
    """Reader of files below one gateway's root."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes

    def accept(self, text: str) -> LocalFile:
        """Return the file that the URL `text` names, without checking that it exists.

        Raises:
            MalformedUrlError: no file URL.
            UrlRefusedError: of another host, or not below the root.
        """
        found = _URL.fullmatch(text) if len(text) <= MAX_URL_CHARS else None
        if found is None or CONTROL.search(text):
            raise MalformedUrlError("it is not a file URL")
        if found["host"].lower() not in ("", "localhost"):
            raise UrlRefusedError("only files of this host are read")
        path = os.fsdecode(unquote_to_bytes(found["path"]))
        names = path.split("/")[1:]
        root = PurePosixPath(self._root).parts[1:]
        if "\x00" in path or len(names) > MAX_NAMES or any(name in ("", ".", "..") for name in names):
            raise UrlRefusedError("its path has parts that are not allowed")
        if tuple(names[: len(root)]) != root or len(names) == len(root):
            raise UrlRefusedError("only files below the root that the operator has set are read")
        return LocalFile(tuple(names[len(root) :]))

    def read(self, file: LocalFile) -> bytes:
        """Return the file's bytes. Call it in a thread.

        Raises:
            FetchError: it cannot be read, is no regular file, or is too large.
        """
        try:
            with ExitStack() as stack:
                return self._read(self._open(file, stack))
        except OSError as error:
            if is_transient(error):
                raise NoResourcesError("the gateway cannot open it just now") from error
            raise _unreadable() from error

    def _open(self, file: LocalFile, stack: ExitStack) -> int:
        *folders, last = file.names
        opened = os.open(self._root, _FOLDER)
        stack.callback(os.close, opened)
        for name in folders:
            opened = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=opened)
            stack.callback(os.close, opened)
        opened = os.open(last, _FILE, dir_fd=opened)
        stack.callback(os.close, opened)
        return opened

    def _read(self, opened: int) -> bytes:
        info = os.fstat(opened)
        if not stat.S_ISREG(info.st_mode):
            raise _unreadable()
        content = io.BytesIO()  # gives its memory away without a copy
        while info.st_size <= self._max_bytes >= content.tell():
            piece = os.read(opened, READ_BYTES)
            if not piece:
                return content.getvalue()
            content.write(piece)
        raise ContentTooLargeError(f"it is larger than {self._max_bytes} bytes")


def _unreadable() -> FetchError:
    """Return one error for all reasons, so that a caller learns nothing about the folder."""
    return ServerRefusedError("it is no file that can be read")
