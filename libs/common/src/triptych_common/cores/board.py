"""Core board: a file in shared memory in which the worker of each engine of a host writes its work.

    header   magic, version                              64 bytes
    slot 0   work | before << 8, since_ns, own cores      64 bytes: a cache line, one writer
    slot 1   ...

No lock is taken to read or write: words that do not belong together make the choice of cores for one step
unfit, and nothing else. The slot itself is held by a kernel lock of the "open file description" kind, which
ends with its process, whatever kills it, and works between containers; a slot without it is free.
"""

import contextlib
import fcntl
import mmap
import os
import stat
import struct
import time
from collections.abc import Collection
from pathlib import Path
from typing import Self

from triptych_common.cores.sharing import EngineLoad, Work
from triptych_common.domain.errors import TriptychError

NUM_SLOTS = 64
SLOT_BYTES = 64
_HEADER = struct.Struct("<8sI")
_MAGIC, _VERSION = b"tripcore", 2
_SLOT = struct.Struct("<QQ32s16x")  # the last: one bit for each core
_FLOCK = struct.Struct("hhqqi0q")  # type, whence, start, length, pid: the kernel's struct flock
_BOARD_BYTES = SLOT_BYTES * (1 + NUM_SLOTS)
MAX_CORES = 256
_LAST_WORK = max(Work)


class CoreBoardError(TriptychError):
    """The board cannot be used: not a file of this user, another version, no free slot, or too many cores."""


def board_path(store_socket: Path) -> Path:
    """Return the board's path, beside the store's socket, which only the engines' user reaches."""
    return store_socket.with_name(store_socket.name + ".cores")


class CoreBoard:
    """Slot of this process on the board and a view of the others. Use it from one thread."""

    def __init__(self, fd: int, memory: mmap.mmap, slot: int, own: Collection[int]) -> None:
        """Take over an open slot; `open` makes boards."""
        self._fd = fd
        self._memory = memory
        self._slot = slot
        self._own = sum(1 << core for core in own).to_bytes(MAX_CORES // 8, "little")
        self._cores_of: dict[bytes, frozenset[int]] = {}  # by the bits on the board
        self._work = Work.IDLE
        self._before = Work.IDLE
        self.publish(Work.IDLE)

    @classmethod
    def open(cls, path: Path, own: Collection[int]) -> Self:
        """Open the file, making it if needed, and take a free slot; `own` are the engine's cores.

        Raises:
            CoreBoardError: the class describes the causes.
        """
        if any(not 0 <= core < MAX_CORES for core in own):
            raise CoreBoardError(f"cores above {MAX_CORES - 1} cannot be shared")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise CoreBoardError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            memory = _map(fd, path)
            return cls(fd, memory, _take_slot(fd, path), own)
        except OSError as error:
            os.close(fd)
            raise CoreBoardError(f"{path} cannot be used: {error.strerror}") from error
        except CoreBoardError:
            os.close(fd)
            raise

    def publish(self, work: Work) -> None:
        if self._work is not Work.IDLE:
            self._before = self._work
        self._work = work
        word = work | self._before << 8
        _SLOT.pack_into(self._memory, _place(self._slot), word, time.monotonic_ns(), self._own)

    def others(self) -> list[EngineLoad]:
        """Return the living engines of the other slots that have worked."""
        slots = enumerate(_SLOT.iter_unpack(self._memory[SLOT_BYTES:]))
        return [
            EngineLoad(Work(word & 0xFF), self._cores(bits), since_ns, Work(word >> 8))
            for slot, (word, since_ns, bits) in slots
            if word and slot != self._slot and _is_work(word) and _is_held(self._fd, slot)
        ]

    def close(self) -> None:
        """Leave the board; may be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._memory.close()
            os.close(fd)  # the lock ends with it

    def _cores(self, bits: bytes) -> frozenset[int]:
        cores = self._cores_of.get(bits)
        if cores is None:
            mask = int.from_bytes(bits, "little")
            cores = frozenset(core for core in range(MAX_CORES) if mask >> core & 1)
            self._cores_of = (
                {bits: cores} if len(self._cores_of) > NUM_SLOTS else {**self._cores_of, bits: cores}
            )
        return cores


def _map(fd: int, path: Path) -> mmap.mmap:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        raise CoreBoardError(f"{path} is not a file of this user")
    if found.st_size == 0:
        os.posix_fallocate(fd, 0, _BOARD_BYTES)  # zeros, not holes: a full tmpfs would kill a writer
    elif found.st_size != _BOARD_BYTES:
        raise CoreBoardError(f"{path} is of another version")
    memory = mmap.mmap(fd, _BOARD_BYTES)
    header = _HEADER.unpack_from(memory)
    if header == (b"\0" * 8, 0):
        _HEADER.pack_into(memory, 0, _MAGIC, _VERSION)  # any process that opens it now writes the same
    elif header != (_MAGIC, _VERSION):
        memory.close()
        raise CoreBoardError(f"{path} is of another version")
    return memory


def _take_slot(fd: int, path: Path) -> int:
    for slot in range(NUM_SLOTS):
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, slot))
            return slot
    raise CoreBoardError(f"{path} has no free slot")


def _is_work(word: int) -> bool:
    return word & 0xFF <= _LAST_WORK and word >> 8 <= _LAST_WORK


def _is_held(fd: int, slot: int) -> bool:
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, slot))
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _range(kind: int, slot: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, _place(slot), SLOT_BYTES, 0)


def _place(slot: int) -> int:
    return SLOT_BYTES * (1 + slot)
