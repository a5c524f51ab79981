"""The files that spans are written to: their names, and how much of the disk they may take.

    {service}-{pid}.jsonl     what a process writes now; locked (flock) as long as it lives
    {service}-{pid}.1.jsonl   what it wrote before; replaced when the file above is full

Each is half of the bound at most. What processes left that have ended is kept for later reading: of
each service the newest files, and no more bytes together than one process may have.
"""

import fcntl
import os
import re
from itertools import count
from pathlib import Path

from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

DEFAULT_MAX_BYTES = 64 << 20
MAX_ENDED_FILES = 64  # of one service: many short lives fill a folder with small files
_SUFFIX, _OLD_SUFFIX = ".jsonl", ".1.jsonl"
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


def trace_files(traces_dir: Path) -> list[Path]:
    """Every file with spans, and where each is moved to: in this order nothing that moves is missed.

    Some may not be there (any more), and what was moved meanwhile is read twice.
    """
    found = set(traces_dir.glob(f"*{_SUFFIX}"))
    old = {path for path in found if path.name.endswith(_OLD_SUFFIX)}
    current = found - old
    return [*sorted(current), *sorted(old | {_old(path) for path in current})]


class TraceFile:
    """This process's file. Not safe for threads; a forked process needs one of its own.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, traces_dir: Path, service: str, max_bytes: int) -> None:
        self._max_file_bytes = max_bytes // 2
        traces_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.pid = os.getpid()
        name = re.sub(r"[^A-Za-z0-9._-]", "_", service)
        self._path, self._fd = _open_own(traces_dir, f"{name}-{self.pid}")
        try:
            _prune(traces_dir, name, self._path, max_bytes)
        except OSError as error:
            log.warning("old trace files not removed", folder=str(traces_dir), error=repr(error))

    def append(self, lines: bytes) -> None:
        """Whole lines, in one piece.

        Raises:
            OSError: they could not be written.
        """
        info = os.fstat(self._fd)
        if info.st_nlink == 0:  # the folder was cleared
            self._reopen()
        elif info.st_size and info.st_size + len(lines) > self._max_file_bytes:
            self._path.replace(_old(self._path))
            self._reopen()
        while lines:
            lines = lines[os.write(self._fd, lines) :]

    def close(self) -> None:
        os.close(self._fd)

    def _reopen(self) -> None:
        """If it fails, the number stays open: a closed one may be another file's by the next call."""
        folder, old = self._path.parent, self._fd
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self._fd = _open_own(folder, self._path.name.removesuffix(_SUFFIX))
        os.close(old)


def _open_own(traces_dir: Path, name: str) -> tuple[Path, int]:
    """A file that no other process writes: one of another container can have the same pid."""
    for number in count(1):
        path = traces_dir / (f"{name}{_SUFFIX}" if number == 1 else f"{name}-{number}{_SUFFIX}")
        fd = os.open(path, _FLAGS, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        except OSError:
            os.close(fd)
            raise
        return path, fd
    raise AssertionError("unreachable")


def _old(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(_SUFFIX) + _OLD_SUFFIX)


def _prune(traces_dir: Path, name: str, own: Path, max_bytes: int) -> None:
    """Remove what ended processes of this service left, the oldest first, beyond the bound."""
    ours = re.compile(rf"{re.escape(name)}-\d+(-\d+)*(\.1)?\.jsonl")
    ended: list[tuple[float, int, Path]] = []
    for path in traces_dir.iterdir():
        current = path.with_name(path.name.removesuffix(_OLD_SUFFIX).removesuffix(_SUFFIX) + _SUFFIX)
        if ours.fullmatch(path.name) and current != own and not _is_written(current):
            try:
                info = path.stat()
            except FileNotFoundError:  # another process tidies up, too
                continue
            ended.append((info.st_mtime, info.st_size, path))
    num_bytes = 0
    for index, (_, size, path) in enumerate(sorted(ended, reverse=True)):
        num_bytes += size
        if num_bytes > max_bytes or index >= MAX_ENDED_FILES:
            path.unlink(missing_ok=True)


def _is_written(path: Path) -> bool:
    """A process holds the file's lock; it may live where its pid means nothing to us."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
