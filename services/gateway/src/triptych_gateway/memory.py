"""Memory: the C library takes each large block from the system and returns it at once.

By itself glibc begins to keep them among small ones when the first has been given back. Media that grow side
by side are then copied again and again, on the event loop, and leave holes: 25 uploads of 20 MiB took 687 to
766 MiB instead of 560, and 706 were still held when all had ended. The price is pages that are new each time:
up to 1 ms of CPU time for each MiB.
"""

import ctypes

MIN_BLOCK_BYTES = 512 << 10  # larger ones are mapped: growing moves page tables, and copies nothing
_M_MMAP_THRESHOLD = -3  # of mallopt(3)


def map_large_blocks() -> None:
    """Set the threshold for this process, if the C library has such an option."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MIN_BLOCK_BYTES)
