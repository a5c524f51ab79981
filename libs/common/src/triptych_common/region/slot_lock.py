"""A kernel lock per client slot: it proves the client alive, and ends with its process, whatever kills it.

The lock is on the bytes of the slot in the region file, of the "open file description" kind: it does not
depend on process ids, so it works between containers, and it cannot be lost by closing another file
descriptor of the region.
"""

import errno
import fcntl
import os
import struct
from pathlib import Path

from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.region.layout import CLIENT_SLOT_BYTES, REGION_HEADER_BYTES

_FLOCK = struct.Struct("hhqqi0q")  # type, whence, start, length, pid: the kernel's struct flock
_HELD = (errno.EAGAIN, errno.EACCES)


class SlotLock:
    """A client's hold on its slot. Close it only when nothing of the region is used any more."""

    def __init__(self, region_path: str | Path, slot: int) -> None:
        """Take the lock of the slot.

        Raises:
            StoreUnavailableError: the region cannot be opened, or another process has the slot.
        """
        try:
            self._fd = os.open(region_path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StoreUnavailableError(f"cannot open the region: {error.strerror}") from error
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, slot))
        except OSError as error:
            os.close(self._fd)
            reason = "another process has it" if error.errno in _HELD else str(error.strerror)
            raise StoreUnavailableError(f"cannot lock client slot {slot}: {reason}") from error
        self.slot = slot

    def close(self) -> None:
        """Release the lock; may be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def is_slot_locked(region_fd: int, slot: int) -> bool:
    """Return whether a client holds `slot`, as the kernel sees it; for the store, which locks none."""
    found = fcntl.fcntl(region_fd, fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, slot))
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _range(kind: int, slot: int) -> bytes:
    start = REGION_HEADER_BYTES + slot * CLIENT_SLOT_BYTES
    return _FLOCK.pack(kind, os.SEEK_SET, start, CLIENT_SLOT_BYTES, 0)
