"""One process's mapping of the region file. Owns memory only: the store decides which parts may be used."""

import ctypes
import mmap
import os
import threading
from pathlib import Path

from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.region import records
from triptych_common.region.layout import RegionLayout
from triptych_common.region.streaming import Copier

POPULATE_STEP_BYTES = 8 << 20
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; not among the constants of `mmap`


class RegionMapping:
    """The region, mapped shared. Memory stays mapped while any view of it lives, `close` or not."""

    def __init__(self, memory: mmap.mmap, *, writable: bool, populate: bool = False) -> None:
        self._memory: mmap.mmap | None = memory
        self._closed = threading.Event()
        self._copier = Copier()
        self._layout: RegionLayout | None = None
        self._populating: threading.Thread | None = None
        self.num_bytes = len(memory)
        self.writable = writable
        self.address = address_of(memory)
        if populate:
            self._populating = threading.Thread(
                target=_populate,
                args=(memory, self.address, writable, self._closed),
                name="region-populate",
                daemon=True,
            )
            self._populating.start()

    @classmethod
    def open(
        cls, path: str | Path, num_bytes: int, writable: bool = True, populate: bool = True
    ) -> "RegionMapping":
        """Map the first `num_bytes` of the file at `path`.

        `populate`: enter all its pages into this process's page table, in a background thread. Without,
        the first use of each page costs a fault, which more than doubles the time of a first copy.

        A mapping is writable in the memory-management sense by default even for consumers: torch warns
        about tensors on read-only memory. Only a reservation's writer writes.

        Raises:
            StoreUnavailableError: the file is missing, not ours to open, or shorter than `num_bytes`.
        """
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise StoreUnavailableError(f"cannot open the region: {error.strerror}") from error
        try:
            if os.fstat(fd).st_size < num_bytes:
                raise StoreUnavailableError("the region file is shorter than the store says")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, protection)
            return cls(memory, writable=writable, populate=populate)
        except (OSError, ValueError) as error:
            raise StoreUnavailableError(f"cannot map the region: {error}") from error
        finally:
            os.close(fd)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return bytes [offset, offset + num_bytes) of the region, without a copy.

        Raises:
            ValueError: outside the region, or the mapping is closed.
        """
        return memoryview(self._checked(offset, num_bytes))[offset : offset + num_bytes]

    def exporter(self, offset: int, num_bytes: int) -> "ctypes.Array[ctypes.c_char]":
        """Return the same bytes as an object that lives as long as anything made from its buffer.

        Raises:
            ValueError: outside the region, the mapping is closed or not writable.
        """
        if not self.writable:
            raise ValueError("the mapping is read-only")
        return (ctypes.c_char * num_bytes).from_buffer(self._checked(offset, num_bytes), offset)

    def write(self, offset: int, source: int, num_bytes: int) -> None:
        """Copy `num_bytes` from the address `source` to `offset`. Releases the GIL.

        Raises:
            ValueError: outside the region, the mapping is closed or not writable.
        """
        target = self.exporter(offset, num_bytes)  # held while we copy: the memory stays mapped
        self._copier.copy(ctypes.addressof(target), source, num_bytes)

    def prepare_writes(self, timeout_s: float) -> bool:
        """Return whether large writes go around the caches, once their loop is compiled."""
        return self._copier.wait_loaded(timeout_s)

    @property
    def layout(self) -> RegionLayout | None:
        """Layout of the region file, which never changes; None for a plain file without headers.

        Raises:
            RegionLayoutError: the region's header is damaged.
        """
        if self._layout is None:
            header = records.read_region_header(self.view(0, records.REGION_HEADER_NUM_BYTES))
            self._layout = None if header is None else header.layout
        return self._layout

    def close(self) -> None:
        """Refuse new views. The memory is freed with the last view. May be called twice."""
        self._memory = None
        self._closed.set()
        if self._populating is not None:
            self._populating.join(5.0)

    def wait_populated(self, timeout_s: float) -> bool:
        if self._populating is not None:
            self._populating.join(timeout_s)
            return not self._populating.is_alive()
        return True

    def _checked(self, offset: int, num_bytes: int) -> mmap.mmap:
        if self._memory is None:
            raise ValueError("the mapping is closed")
        if offset < 0 or num_bytes <= 0 or offset + num_bytes > self.num_bytes:
            raise ValueError(f"bytes {offset} to {offset + num_bytes} are outside the region")
        return self._memory


def _populate(memory: mmap.mmap, address: int, writable: bool, closed: threading.Event) -> None:
    """Populate pages without the GIL: old kernels refuse, and the store reports a full tmpfs."""
    advice = MADV_POPULATE_WRITE if writable else MADV_POPULATE_READ
    num_bytes = len(memory)
    for offset in range(0, num_bytes, POPULATE_STEP_BYTES):
        step = min(POPULATE_STEP_BYTES, num_bytes - offset)
        if closed.is_set() or madvise(address + offset, step, advice) != 0:
            return


def address_of(memory: mmap.mmap) -> int:
    holder = ctypes.py_object(memory)
    buffer = _PyBuffer()
    _get_buffer(holder, ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf)
    finally:
        _release_buffer(ctypes.byref(buffer))


class _PyBuffer(ctypes.Structure):
    """CPython's `Py_buffer`: the only way to get the address of a mapping that may be read-only."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


madvise = ctypes.CDLL(None, use_errno=True).madvise
madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)
_release_buffer.restype = None
