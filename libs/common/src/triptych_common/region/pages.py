"""Large pages for the region, where its tmpfs gives them: fewer entries in page tables, fewer TLB misses.

Whether it does is up to the mount (`huge=` among its options) or, for /dev/shm, the machine's
(/sys/kernel/mm/transparent_hugepage/shmem_enabled). Asking is never an error; smaps has the result.
"""

import mmap
import re
from pathlib import Path

from triptych_common.region.mapping import MADV_POPULATE_WRITE, address_of, madvise

MADV_HUGEPAGE = 14
SMAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"^([0-9a-f]+)-[0-9a-f]+ ", re.MULTILINE)
_HUGE = re.compile(r"^(?:ShmemPmdMapped|FilePmdMapped): +(\d+) kB", re.MULTILINE)


def want_large_pages(memory: mmap.mmap) -> bool:
    """Ask for large pages before the memory is first used; return False if the kernel has none."""
    return bool(madvise(address_of(memory), len(memory), MADV_HUGEPAGE) == 0)


def try_populate(memory: mmap.mmap, offset: int, num_bytes: int) -> bool:
    """Allocate these bytes and enter them into this process's page table; return False if it failed."""
    return bool(madvise(address_of(memory) + offset, num_bytes, MADV_POPULATE_WRITE) == 0)


def num_large_page_bytes(memory: mmap.mmap) -> int:
    """Return the bytes of `memory` that this process has mapped by large pages."""
    smaps = SMAPS.read_text()
    starts = list(_MAPPING.finditer(smaps))
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        if int(start[1], 16) == address_of(memory):
            body = smaps[start.end() : following.start() if following else len(smaps)]
            return sum(int(number) for number in _HUGE.findall(body)) << 10
    return 0
