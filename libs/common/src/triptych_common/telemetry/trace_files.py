"""The files that spans are written to: their names, how much of the disk they may take, and for how long.

    {service}-{pid}.jsonl     what a process writes now; locked (flock) as long as it lives
    {service}-{pid}.1.jsonl   what it wrote before; replaced when the file above is full

Each is half of the bound at most. Files of ended processes are kept for later reading: the newest of each
service, with no more bytes together than one process may have.

No span is kept much longer than the age that is allowed, and none goes before half of it but for the
bytes: the first file is moved aside when its oldest span has half the age, and a file that was moved, or left
by an ended process, is removed when its newest span has all of it. This is checked when a process starts, and
while it writes, every `CHECK_S` at most.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

DEFAULT_MAX_BYTES = 64 << 20
DEFAULT_MAX_AGE_S = 7 * 86_400
CHECK_S = 600
MAX_ENDED_FILES = 64  # of one service: many short lives fill a folder with small files
_SUFFIX, _OLD_SUFFIX = ".jsonl", ".1.jsonl"
_END_NS = re.compile(rb'"end_ns":(\d+)')
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


def trace_files(traces_dir: Path) -> list[Path]:
    """Return every file with spans, and where each is moved to, in an order that misses no moving file.

    Some may be missing, and a file that moves meanwhile is read twice.
    """
    found = set(traces_dir.glob(f"*{_SUFFIX}"))
    old = {path for path in found if path.name.endswith(_OLD_SUFFIX)}
    current = found - old
    return [*sorted(current), *sorted(old | {_old(path) for path in current})]


class TraceFile:
    """Trace file of this process. Not safe for threads; a forked process needs one of its own.

    Args:
        max_age_s: 0 keeps spans of any age.
        now: wall clock, seconds since the epoch.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(
        self,
        traces_dir: Path,
        service: str,
        max_bytes: int,
        *,
        max_age_s: int = DEFAULT_MAX_AGE_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._now = now
        traces_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.pid = os.getpid()
        self._name = re.sub(r"[^A-Za-z0-9._-]", "_", service)
        self._path, self._fd = _open_own(traces_dir, f"{self._name}-{self.pid}")
        self._oldest_at = _oldest_span_at(self._path)  # wall clock; None: it is empty
        self._is_cut = _is_cut(self._path)  # its last line has no end
        self._prune()

    def append(self, lines: bytes) -> None:
        """Append whole lines in one write. Raises OSError: they could not be written."""
        now = self._now()
        info = os.fstat(self._fd)
        if info.st_nlink == 0:  # the folder was cleared
            self._reopen()
        elif info.st_size and (info.st_size + len(lines) > self._max_bytes // 2 or self._is_old(now)):
            self._path.replace(_old(self._path))
            self._reopen()
        if self._max_age_s and now >= self._next_check_at:
            self._prune()
        if self._oldest_at is None:
            self._oldest_at = now
        if self._is_cut:
            lines = b"\n" + lines
        self._is_cut = True  # where the disk is full, a part of them may be written
        while lines:
            lines = lines[os.write(self._fd, lines) :]
        self._is_cut = False

    def _is_old(self, now: float) -> bool:
        if not self._max_age_s or self._oldest_at is None:
            return False
        return now - self._oldest_at >= self._max_age_s / 2

    def _prune(self) -> None:
        now = self._now()
        self._next_check_at = now + min(CHECK_S, self._max_age_s / 2)
        oldest_at = now - self._max_age_s if self._max_age_s else 0.0
        folder = self._path.parent
        try:
            _prune(folder, self._name, self._path, self._max_bytes, oldest_at)
        except OSError as error:
            log.warning("old trace files not removed", folder=str(folder), error=repr(error))

    def close(self) -> None:
        os.close(self._fd)

    def _reopen(self) -> None:
        """Open a new file before the old one is closed, so that a failure leaves a valid descriptor."""
        folder, old = self._path.parent, self._fd
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self._fd = _open_own(folder, self._path.name.removesuffix(_SUFFIX))
        self._oldest_at = None
        self._is_cut = False
        os.close(old)


def _open_own(traces_dir: Path, name: str) -> tuple[Path, int]:
    """Open a file that no other process writes: one in another container can have the same pid."""
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


def _oldest_span_at(path: Path) -> float | None:
    """Return when the file's first span ended: None without spans, 0 if it cannot be read."""
    with path.open("rb") as file:
        line = file.readline(1 << 20)
    found = _END_NS.search(line)
    return None if not line else int(found[1]) / 1e9 if found else 0.0


def _is_cut(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _prune(traces_dir: Path, name: str, own: Path, max_bytes: int, oldest_at: float) -> None:
    """Remove files of this service older than `oldest_at`, and ended processes' oldest beyond the bound."""
    ours = re.compile(rf"{re.escape(name)}-\d+(-\d+)*(\.1)?\.jsonl")
    ended: list[tuple[float, int, Path]] = []
    for path in traces_dir.iterdir():
        if not ours.fullmatch(path.name) or path == own:
            continue
        current = path.with_name(path.name.removesuffix(_OLD_SUFFIX).removesuffix(_SUFFIX) + _SUFFIX)
        is_ended = current != own and not _is_written(current)
        if not is_ended and path == current:
            continue
        try:
            info = path.stat()
            if info.st_mtime < oldest_at:
                path.unlink()
            elif is_ended:
                ended.append((info.st_mtime, info.st_size, path))
        except FileNotFoundError:  # another process tidies up, too
            continue
    num_bytes = 0
    for index, (_, size, path) in enumerate(sorted(ended, reverse=True)):
        num_bytes += size
        if num_bytes > max_bytes or index >= MAX_ENDED_FILES:
            path.unlink(missing_ok=True)


def _is_written(path: Path) -> bool:
    """Return whether a process holds the file's lock; its pid may mean nothing in this container."""
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
