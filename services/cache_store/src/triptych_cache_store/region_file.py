"""The region file: made, locked against a second store, prefaulted in the background, removed at the end."""

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from triptych_common.region.layout import RegionLayout, RegionLayoutError
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

PREFAULT_STEP_BYTES = 32 << 20


class RegionFile:
    """Owner of the file on tmpfs that every client maps."""

    def __init__(self, path: Path, fd: int, layout: RegionLayout) -> None:
        self.path = path
        self.layout = layout
        self._fd = fd
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_prefaulted_bytes = 0

    @classmethod
    def create(cls, path: Path, layout: RegionLayout) -> "RegionFile":
        """A fresh region at `path`, 0600. What an earlier store left there is unlinked: its clients keep it.

        Raises:
            RegionLayoutError: another store runs on it, the directory cannot be used, or there is no room.
        """
        _refuse_if_locked(path)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            _check_room(path.parent, layout.num_bytes)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RegionLayoutError(f"cannot make the region {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, layout.num_bytes)
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise RegionLayoutError(f"cannot size the region {path}: {error.strerror}") from error
        return cls(path, fd, layout)

    def start_prefault(self, on_failure: Callable[[str], None]) -> None:
        """Get the file's memory in a background thread, so that no client ever waits for it.

        `on_failure` is called in that thread when the tmpfs has not enough: writers would be killed
        by SIGBUS, so the store must end.
        """
        self._thread = threading.Thread(
            target=self._prefault, args=(on_failure,), name="prefault", daemon=True
        )
        self._thread.start()

    def wait_prefaulted(self, timeout_s: float) -> bool:
        """Whether the whole region is in memory within `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.num_prefaulted_bytes == self.layout.num_bytes

    def close(self, *, unlink: bool) -> None:
        """Stop prefaulting, let go of the lock, and remove the file if `unlink`."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(10.0)
        if unlink:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def _prefault(self, on_failure: Callable[[str], None]) -> None:
        started_at = time.monotonic()
        for offset in range(0, self.layout.num_bytes, PREFAULT_STEP_BYTES):
            if self._stopping.is_set():
                return
            num_bytes = min(PREFAULT_STEP_BYTES, self.layout.num_bytes - offset)
            try:
                os.posix_fallocate(self._fd, offset, num_bytes)
            except OSError as error:
                on_failure(f"the region's {self.layout.num_bytes} bytes are not to be had: {error.strerror}")
                return
            self.num_prefaulted_bytes = offset + num_bytes
        log.info(
            "region prefaulted",
            num_bytes=self.layout.num_bytes,
            elapsed_s=round(time.monotonic() - started_at, 3),
        )


def _refuse_if_locked(path: Path) -> None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RegionLayoutError(f"cannot open the region {path}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise RegionLayoutError(f"another store runs on the region {path}") from None
    finally:
        os.close(fd)


def _check_room(directory: Path, num_bytes: int) -> None:
    info = os.statvfs(directory)
    available = info.f_bavail * info.f_frsize
    if available < num_bytes:
        raise RegionLayoutError(
            f"the region of {num_bytes} bytes does not fit into {directory}, where {available} bytes are free"
        )
