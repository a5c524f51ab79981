"""Regime in which tensors stay: how much may be kept, and the times of each way's tensors."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from handover_ways.dirty import DirtyPages
from handover_ways.peers import Pair, Passage
from handover_ways.results import Result, result_of
from handover_ways.ways import WIDTH

MIB, GIB = 1 << 20, 1 << 30
MOST_DISK_BYTES = 6 * GIB
DISK_SPARE_BYTES = 4 * GIB
BEYOND = 1.5  # times what may be kept are handed over, so that old ones must go
WARM_UPS = 2


@dataclass(frozen=True)
class KeptBounds:
    """Bytes that may be kept, by the medium."""

    region_bytes: int  # also Redis'
    tmpfs_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, region_gib: float, tmpfs_gib: float, disk_gib: float | None) -> "KeptBounds":
        """Bounds; without `disk_gib`, enough that the kernel slows writers, within reason."""
        disk_bytes = min(MOST_DISK_BYTES, 2 * DirtyPages.now().limit) if disk_gib is None else disk_gib * GIB
        return cls(int(region_gib * GIB), int(tmpfs_gib * GIB), int(disk_bytes))

    def refusal(self) -> str | None:
        """Reason why this machine cannot keep so much, or None."""
        free = shutil.disk_usage(Path()).free
        if free < self.disk_bytes + DISK_SPARE_BYTES:
            return f"{self.disk_bytes / GIB:.1f} GiB of files and a rest do not fit: {free / GIB:.1f} free"
        free = min(shutil.disk_usage("/dev/shm").free, available_bytes())
        needed = 2 * self.region_bytes + max(self.region_bytes, self.tmpfs_bytes)
        if free < needed:
            return f"{needed / GIB:.1f} GiB of memory are needed, {free / GIB:.1f} are free"
        return None


@dataclass(frozen=True)
class Series:
    """One way's tensors in order, with the bytes that were not written back yet."""

    way: str
    size_mib: float
    tensor_ms: list[float]
    read_ms: list[float]
    dirty_mib: list[int]
    throttle_mib: int  # from here on the kernel slows down writers

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def summary(self) -> str:
        most = max(self.dirty_mib)
        return (
            f"{self.way}, kept: at most {most} MiB were not on the disk yet; writers are slowed down from "
            f"{self.throttle_mib} MiB on: {'reached' if most >= self.throttle_mib else 'not reached'}"
        )


def measure_kept(
    pair: Pair, ways: Sequence[str], bounds: KeptBounds, mib: float
) -> tuple[list[Result], list[Series]]:
    """Measure each way by itself, with a memcpy before each tensor."""
    rows = max(1, int(mib * MIB) // (2 * WIDTH))
    results, series, all_memcpys = [], [], list[Passage]()
    for way in ways:
        if way.startswith(("memcpy", "message")):
            continue
        kept = {
            "st disk": bounds.disk_bytes / BEYOND,
            "store": bounds.region_bytes,
            "redis": bounds.region_bytes,
        }
        num_tensors = int(kept.get(way, bounds.tmpfs_bytes) * BEYOND / (rows * WIDTH * 2)) + WARM_UPS
        memcpys, passages, dirty = [], [], []
        for _ in range(num_tensors):
            memcpys.append(hand_over(pair, "memcpy", rows))
            passages.append(hand_over(pair, way, rows))
            dirty.append(DirtyPages.now())
        memcpys, passages, dirty = memcpys[WARM_UPS:], passages[WARM_UPS:], dirty[WARM_UPS:]
        all_memcpys += memcpys
        results.append(result_of("kept", way, mib, 1, passages, memcpys))
        series.append(series_of(way, mib, passages, dirty))
        pair.clear(way)
    return [result_of("kept", "memcpy", mib, 1, all_memcpys), *results], series


def series_of(way: str, mib: float, passages: list[Passage], dirty: list[DirtyPages]) -> Series:
    return Series(
        way,
        mib,
        [each.tensor_s * 1e3 for each in passages],
        [each.read_s * 1e3 for each in passages],
        [each.dirty // MIB for each in dirty],
        dirty[-1].throttle_from // MIB,
    )


def hand_over(pair: Pair, way: str, rows: int) -> Passage:
    pair.order(way, rows, keeps=True)
    pair.go()
    return pair.finish()


def available_bytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10
