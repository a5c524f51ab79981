"""Dirty pages: written bytes that are not on the disk yet, and the limit at which writers are slowed."""

from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = 4096
VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True)
class DirtyPages:
    """Dirty pages of the whole machine, in bytes."""

    dirty: int
    throttle_from: int  # halfway between where write-back begins and where writers must wait for it
    limit: int

    @classmethod
    def now(cls) -> "DirtyPages":
        numbers = dict(line.split() for line in VMSTAT.read_text().splitlines())
        background, limit = (
            int(numbers[name]) * PAGE_BYTES
            for name in ("nr_dirty_background_threshold", "nr_dirty_threshold")
        )
        dirty = sum(int(numbers[name]) for name in ("nr_dirty", "nr_writeback")) * PAGE_BYTES
        return cls(dirty, (background + limit) // 2, limit)
