"""Log files rotated while their service runs.

    stdout and stderr of a service --pipe--> a thread of the supervisor --> NAME.log, NAME.log.1, ...

A service has the pipe and not the file. It reopens nothing, and no line is lost between two files, which
copying and truncating would lose. The thread does nothing else, so a busy event loop delays no service.

A service blocks while its pipe is full: while the supervisor is stopped, or its disk hangs. Output that
cannot be written (a full disk) is dropped. If the supervisor is killed its services end, and their last
output is lost.
"""

import contextlib
import fcntl
import io
import itertools
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

NUM_FILES = 4  # of one service, the current one included
PIPE_BYTES = 1 << 20  # output buffered for a service; the kernel keeps lines whole up to it
CHUNK_BYTES = 64 << 10


class RotatingLog(io.RawIOBase):
    """Appends to `file`; all files of the log together take little more than `max_bytes`.

    A file ends with the end of a line, unless a line is as long as a whole file.
    """

    def __init__(self, file: Path, max_bytes: int) -> None:
        super().__init__()
        self.file = file
        self._file_bytes = max_bytes // NUM_FILES
        self._lock = threading.Lock()  # a restarted service writes beside what is left of the one before
        self._stream: io.FileIO | None = None
        self._num_bytes = 0
        self._is_within_line = False

    def writable(self) -> bool:
        return True

    def write(self, data: "ReadableBuffer", /) -> int:
        """Append all of it, in the next file if this one is full."""
        rest = whole = bytes(data)
        with self._lock, contextlib.suppress(OSError):
            if self._num_bytes >= self._file_bytes:
                end = rest.find(b"\n") + 1 if self._is_within_line else 0
                if self._is_within_line and not end and self._num_bytes < 2 * self._file_bytes:
                    end = len(rest)
                if end:
                    self._append(rest[:end])
                    rest = rest[end:]
                if rest:
                    self._rotate()
            if rest:
                self._append(rest)
        return len(whole)

    def close(self) -> None:
        self.close_file()
        super().close()

    def close_file(self) -> None:
        """Close the current file until there is more to append."""
        with self._lock:
            if self._stream is not None:
                self._stream.close()
                self._stream = None

    def _append(self, data: bytes) -> None:
        if self._stream is None:
            self._stream = io.FileIO(self.file, "a")
            self._num_bytes = self._stream.tell()
        self._stream.write(data)
        self._num_bytes += len(data)
        self._is_within_line = not data.endswith(b"\n")

    def _rotate(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        shift_logs(self.file)
        self._num_bytes = 0


def shift_logs(file: Path) -> None:
    """Rename `NAME.log` to `NAME.log.1`, that to `NAME.log.2`, and so on; delete the last."""
    names = [file, *(older_log(file, number) for number in range(1, NUM_FILES))]
    for newer, older in reversed(list(itertools.pairwise(names))):
        with contextlib.suppress(FileNotFoundError):
            newer.replace(older)


def older_log(file: Path, number: int = 1) -> Path:
    """The file `number` rotations before `file`."""
    return file.with_suffix(f".log.{number}")


class LogPipe:
    """Pipe of one process; its thread ends when all writers have ended."""

    def __init__(self, log: RotatingLog) -> None:
        reading, self.writing = os.pipe()
        with contextlib.suppress(OSError):  # more than the user may have: the usual 64 KiB
            fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._thread = threading.Thread(
            target=_copy, args=(reading, log), name=f"log-{log.file.stem}", daemon=True
        )
        self._thread.start()

    def close_writing(self) -> None:
        """Close the supervisor's copy of the write end; the process has its own."""
        os.close(self.writing)

    def wait_end(self, timeout_s: float) -> None:
        """Block until everything written is in the log; a process outside the session may go on."""
        self._thread.join(timeout_s)


def _copy(reading: int, log: RotatingLog) -> None:
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while data := pipe.read(CHUNK_BYTES):
            log.write(data)
    log.close_file()
