"""Region file: created or reused, locked against a second store, prefaulted in the background.

A file left by an earlier store is reused if its layout is the configured one, else replaced: clients that
still use it keep its memory and learn that their leases are gone.
"""

import ctypes
import fcntl
import mmap
import os
import platform
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from triptych_common.region.layout import REGION_HEADER_BYTES, RegionLayout, RegionLayoutError
from triptych_common.region.mapping import MADV_POPULATE_WRITE, address_of, madvise
from triptych_common.region.records import RegionHeader, read_region_header, write_region_header
from triptych_common.region.slot_lock import is_slot_locked
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

SYSFS = Path("/sys")
MBIND = {"x86_64": 237, "aarch64": 235}  # glibc has no function for it
MPOL_PREFERRED = 1
NVIDIA, DISPLAY_CLASS = "0x10de", "0x03"

MADV_HUGEPAGE = 14
SMAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"^([0-9a-f]+)-[0-9a-f]+ ", re.MULTILINE)
_HUGE = re.compile(r"^(?:ShmemPmdMapped|FilePmdMapped): +(\d+) kB", re.MULTILINE)


def region_node(sysfs: Path, gpu_bus_id: str | None) -> int | None:
    """NUMA node of the GPU at `gpu_bus_id`; if that is None, the one that all NVIDIA GPUs have in common.

    None: the machine has one node, or it is not known.
    """
    if len(list((sysfs / "devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    devices = sysfs / "bus/pci/devices"
    if gpu_bus_id is not None:
        folders = [devices / gpu_bus_id.lower()]
    else:
        folders = [each for each in devices.glob("*") if _is_gpu(each)]
    nodes = {_read(each / "numa_node") for each in folders}
    node = nodes.pop() if len(nodes) == 1 else ""
    return int(node) if node.isdecimal() else None  # "-1": the firmware does not say


def prefer_node(memory: mmap.mmap, node: int) -> bool:
    """Make the kernel take memory's pages from `node` while it has some; False if it refuses.

    The policy is that of the file's pages, so it holds for every process that maps them.
    """
    number = MBIND.get(platform.machine())
    if number is None:
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    num_words = node // 64 + 1
    mask = (ctypes.c_uint64 * num_words)()
    mask[node // 64] = 1 << node % 64
    address, num_bytes = ctypes.c_void_p(address_of(memory)), ctypes.c_size_t(len(memory))
    max_node = ctypes.c_ulong(64 * num_words + 1)
    result = call(
        ctypes.c_long(number),
        address,
        num_bytes,
        ctypes.c_int(MPOL_PREFERRED),
        mask,
        max_node,
        ctypes.c_uint(0),
    )
    if result != 0:
        log.warning("region not put beside the GPU", node=node, error=os.strerror(ctypes.get_errno()))
    return bool(result == 0)


def _is_gpu(device: Path) -> bool:
    return _read(device / "vendor") == NVIDIA and _read(device / "class").startswith(DISPLAY_CLASS)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def want_large_pages(memory: mmap.mmap) -> bool:
    """Ask for large pages before the memory is first used; return False if the kernel has none.

    Whether it does is up to the mount (`huge=` among its options) or, for /dev/shm, the machine's
    (/sys/kernel/mm/transparent_hugepage/shmem_enabled). Asking is never an error; smaps has the result.
    """
    return bool(madvise(address_of(memory), len(memory), MADV_HUGEPAGE) == 0)


def try_populate(memory: mmap.mmap, offset: int, num_bytes: int) -> bool:
    """Allocate these bytes and enter them into this process's page table; return False if it failed."""
    return bool(madvise(address_of(memory) + offset, num_bytes, MADV_POPULATE_WRITE) == 0)


def num_large_page_bytes(memory: mmap.mmap) -> int:
    smaps = SMAPS.read_text()
    starts = list(_MAPPING.finditer(smaps))
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        if int(start[1], 16) == address_of(memory):
            body = smaps[start.end() : following.start() if following else len(smaps)]
            return sum(int(number) for number in _HUGE.findall(body)) << 10
    return 0


PREFAULT_STEP_BYTES = 32 << 20


class RegionFile:
    """Owner of the tmpfs file that every client maps, and of its mapping here.

    `is_new`: the file holds nothing of an earlier store.
    """

    def __init__(self, path: Path, fd: int, header: RegionHeader, *, is_new: bool) -> None:
        self.path = path
        self.header = header
        self.is_new = is_new
        self._fd = fd
        self._memory = mmap.mmap(fd, header.layout.num_bytes)
        self.buffer = memoryview(self._memory)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_prefaulted_bytes = 0
        write_region_header(self.buffer, header)

    @classmethod
    def open(cls, path: Path, layout: RegionLayout, now: float) -> "RegionFile":
        """Open the region at `path`, mode 0600, for a store that starts at `now` (Unix seconds).

        Raises:
            RegionLayoutError: another store runs on it, it is not ours, of another version or damaged, the
                directory cannot be used, or has not enough memory.
        """
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = _try_take_up(path, layout)
            if found is not None:
                fd, header = found
                generation = max(int(now), header.generation + 1)
                return cls(path, fd, replace(header, generation=generation), is_new=False)
            header = RegionHeader(layout, max(int(now), 1), secrets.token_bytes(16))
            return cls(path, _create(path, layout.num_bytes, layout.data_offset), header, is_new=True)
        except OSError as error:
            raise RegionLayoutError(f"cannot use the region {path}: {error.strerror}") from error

    def is_client_alive(self, slot: int) -> bool:
        """True if the client in `slot` holds its lock."""
        return is_slot_locked(self._fd, slot)

    def start_prefault(self, on_failure: Callable[[str], None], *, large_pages: bool = False) -> None:
        """Allocate the file's memory in a background thread, so that clients never wait for it.

        `large_pages` requests huge pages first; the log shows what was obtained. `on_failure` is called in
        that thread if the tmpfs is too small: writers would be killed by SIGBUS, so the store must end.
        """
        self._thread = threading.Thread(
            target=self._prefault, args=(on_failure, large_pages), name="prefault", daemon=True
        )
        self._thread.start()

    def prefer_node(self, node: int) -> bool:
        """See `numa.prefer_node`; called before the memory is allocated."""
        return prefer_node(self._memory, node)

    def wait_prefaulted(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; True if the whole region is in memory."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.num_prefaulted_bytes == self.header.layout.num_bytes

    def close(self, *, unlink: bool) -> None:
        """Stop prefaulting, release the lock, and remove the file if `unlink`."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(10.0)
        if unlink:
            self.path.unlink(missing_ok=True)
        self.buffer.release()
        self._memory.close()
        os.close(self._fd)

    def _prefault(self, on_failure: Callable[[str], None], large_pages: bool) -> None:
        started_at = time.monotonic()
        populates = large_pages and want_large_pages(self._memory)
        for offset in range(0, self.header.layout.num_bytes, PREFAULT_STEP_BYTES):
            if self._stopping.is_set():
                return
            num_bytes = min(PREFAULT_STEP_BYTES, self.header.layout.num_bytes - offset)
            if populates and not try_populate(self._memory, offset, num_bytes):
                populates = False  # the tmpfs is full, or the kernel too old: the next line shows which
            try:
                os.posix_fallocate(self._fd, offset, num_bytes)
            except OSError as error:
                on_failure(f"the tmpfs has no memory for the region: {error.strerror}")
                return
            self.num_prefaulted_bytes = offset + num_bytes
        log.info(
            "region prefaulted",
            num_bytes=self.header.layout.num_bytes,
            elapsed_s=round(time.monotonic() - started_at, 3),
        )
        if large_pages:
            self._log_large_pages()

    def _log_large_pages(self) -> None:
        num_bytes = num_large_page_bytes(self._memory)
        if num_bytes:
            log.info("region has large pages", num_bytes=num_bytes)
        else:
            log.warning(
                "no large pages: mount the tmpfs with huge=advise, or see shmem_enabled", path=str(self.path)
            )


def _try_take_up(path: Path, layout: RegionLayout) -> tuple[int, RegionHeader] | None:
    """Existing file, locked, with its header; None if there is none or it was removed as unfit."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        _lock(fd, path)
        header = _read_header(fd, path)
        if header is not None and header.layout == layout:
            return fd, header
    except BaseException:
        os.close(fd)
        raise
    if header is not None:
        log.warning("region has another size, replaced", path=str(path), num_bytes=header.layout.num_bytes)
    path.unlink()
    os.close(fd)
    return None


def _read_header(fd: int, path: Path) -> RegionHeader | None:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise RegionLayoutError(f"the region {path} is not a file of this user alone (want mode 0600)")
    head = os.pread(fd, REGION_HEADER_BYTES, 0)
    if len(head) < REGION_HEADER_BYTES:
        return None
    header = read_region_header(memoryview(head))
    if header is not None and info.st_size != header.layout.num_bytes:
        raise RegionLayoutError(f"the region {path} has {info.st_size} bytes, not what its header says")
    return header


def _create(path: Path, num_bytes: int, headers_num_bytes: int) -> int:
    _check_free_memory(path.parent, num_bytes)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _lock(fd, path)
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, headers_num_bytes)  # otherwise writing a header could raise SIGBUS
    except BaseException:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return fd


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RegionLayoutError(f"another store runs on the region {path}") from None


def _check_free_memory(directory: Path, num_bytes: int) -> None:
    info = os.statvfs(directory)
    available = info.f_bavail * info.f_frsize
    if available < num_bytes:
        raise RegionLayoutError(
            f"the region of {num_bytes} bytes does not fit into {directory}, where {available} bytes are free"
        )
