"""Simulation of allocators and eviction policies, on the store's own classes.

    python benchmarks/allocation.py [--steps N] [--seed N] [--json FILE]

Requests draw their image from a skewed popularity (half of them from 60,000 images by a power law, half
never seen again); an image has 256 to 16,384 rows, log-uniform. What is used is pinned for up to 20
further requests. Reported for each scheme, after the region has filled:

    used       mean share of the region that holds tensors (rounding and fragmentation are the rest)
    rows hit   share of all requested rows that did not have to be encoded again
    evictions  per tensor written
    us         mean microseconds for one allocation with its evictions; `max ms` the longest
"""

import argparse
import heapq
import json
import math
import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triptych_cache_store.entries import space as room
from triptych_cache_store.entries.block_pool import BestFitPool, BlockRange
from triptych_cache_store.entries.entry_table import Entry, EntryTable
from triptych_cache_store.entries.space import EvictionPolicy, Space
from triptych_cache_store.persistence.journal import RegionJournal
from triptych_common.protocol.ids import MmHash, ReservationId
from triptych_common.protocol.store import TensorSpec
from triptych_common.region.layout import RegionLayout

BLOCK = 64 << 10
GIB = 1 << 30
NUM_POPULAR = 60_000
ROWS = (256, 16_384)
MAX_PINNED_STEPS = 20


class BuddyPool:
    """Powers of two, split and joined: the usual alternative. A range takes its size rounded up."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks
        self._free: list[set[int]] = [set() for _ in range(num_blocks.bit_length())]
        start = 0
        for order in reversed(range(num_blocks.bit_length())):
            if num_blocks >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def try_allocate(self, num_blocks: int) -> BlockRange | None:
        needed = (num_blocks - 1).bit_length()
        order = next((each for each in range(needed, len(self._free)) if self._free[each]), None)
        if order is None:
            return None
        start = self._free[order].pop()
        while order > needed:
            order -= 1
            self._free[order].add(start + (1 << order))
        self.num_free_blocks -= 1 << needed
        return BlockRange(start, num_blocks)

    def free(self, blocks: BlockRange) -> None:
        order, start = (blocks.num_blocks - 1).bit_length(), blocks.start
        self.num_free_blocks += 1 << order
        while order + 1 < len(self._free) and start ^ (1 << order) in self._free[order]:
            self._free[order].remove(start ^ (1 << order))
            start &= ~(1 << order)
            order += 1
        self._free[order].add(start)

    def restore(self, allocated: Iterable[BlockRange]) -> None:
        raise NotImplementedError

    def largest_free_range(self) -> int:
        return next((1 << order for order in reversed(range(len(self._free))) if self._free[order]), 0)

    def num_free_from(self, start: int) -> int:
        return 0

    def num_free_before(self, end: int) -> int:
        return 0


@dataclass(frozen=True)
class Mix:
    """Shape of a region and of its requests."""

    name: str
    region_gib: int
    widths: tuple[int, ...]


MIXES = (
    Mix("one model, 8 GiB, width 4096", 8, (4096,)),
    Mix("two models, 3 GiB, widths 4096 and 8192", 3, (4096, 8192)),
    Mix("five models, 32 GiB, widths 1024 to 16384", 32, (1024, 2048, 4096, 8192, 16_384)),
)
SCHEMES = ("best fit, oldest first", "buddy, oldest first", "best fit, cheapest neighbours")


@dataclass(frozen=True)
class Outcome:
    mix: str
    scheme: str
    used: float
    rows_hit: float
    evictions: float
    mean_us: float
    max_ms: float
    num_full: int


class Simulation:
    """One region, one scheme, one stream of requests."""

    def __init__(self, mix: Mix, scheme: str, seed: int) -> None:
        layout = RegionLayout.fit(mix.region_gib * GIB, BLOCK)
        pool: Any = BuddyPool(layout.num_blocks) if "buddy" in scheme else BestFitPool(layout.num_blocks)
        journal = RegionJournal(memoryview(bytearray(layout.data_offset)), layout)
        self.mix, self.scheme = mix, scheme
        self.space = Space(EntryTable(BLOCK), pool, EvictionPolicy(), journal)
        self._random = random.Random(seed)
        self._specs: dict[int, TensorSpec] = {}
        self._pinned: list[tuple[int, int, Entry]] = []
        self._uses: list[float] = []
        self._times: list[float] = []
        self._rows_hit = self._rows_asked = self._num_full = self._used_blocks = 0

    def run(self, num_steps: int) -> Outcome:
        for step in range(num_steps):
            self._unpin(step)
            self._request(step)
            if step % 20 == 0 and self.space.num_evictions:
                self._uses.append(self._used_blocks / self.space.pool.num_blocks)
        mean_s = sum(self._times) / len(self._times)
        return Outcome(
            mix=self.mix.name,
            scheme=self.scheme,
            used=sum(self._uses) / max(1, len(self._uses)),
            rows_hit=self._rows_hit / self._rows_asked,
            evictions=self.space.num_evictions / len(self._times),
            mean_us=mean_s * 1e6,
            max_ms=max(self._times) * 1e3,
            num_full=self._num_full,
        )

    def _request(self, step: int) -> None:
        if self._random.random() < 0.5:
            image = int(NUM_POPULAR ** self._random.random())
        else:
            image = self._random.randrange(10**6, 10**12)
        spec = self._specs.get(image) or self._new_spec(image)
        self._rows_asked += spec.shape[0]
        mm_hash = MmHash(f"{image:064x}")
        entry = self.space.table.find_sealed(mm_hash)
        if entry is not None:
            self._rows_hit += spec.shape[0]
        else:
            entry = self._write(mm_hash, spec, step)
            if entry is None:
                return
        self.space.pin(entry, float(step))
        heapq.heappush(self._pinned, (step + self._random.randrange(1, MAX_PINNED_STEPS), step, entry))

    def _new_spec(self, image: int) -> TensorSpec:
        rows = int(math.exp(self._random.uniform(math.log(ROWS[0]), math.log(ROWS[1]))))
        width = self._random.choice(self.mix.widths)
        spec = TensorSpec(shape=(rows, width), dtype="bfloat16", num_bytes=rows * width * 2)
        if image <= NUM_POPULAR:
            self._specs[image] = spec
        return spec

    def _write(self, mm_hash: MmHash, spec: TensorSpec, step: int) -> Entry | None:
        started_at = time.perf_counter()
        before = self.space.num_evictions
        blocks = self.space.try_allocate(-(-spec.num_bytes // BLOCK), float(step))
        self._times.append(time.perf_counter() - started_at)
        if self.space.num_evictions > before:
            self._used_blocks = sum(entry.blocks.num_blocks for entry in self.space.table.all_sealed())
        if blocks is None:
            self._num_full += 1
            return None
        entry = Entry(ReservationId(step + 1), mm_hash, spec, blocks, 1, "", float(step))
        self.space.reserve(entry, writer_slot=0)
        self.space.seal(entry, float(step))
        self._used_blocks += blocks.num_blocks
        return entry

    def _unpin(self, step: int) -> None:
        while self._pinned and self._pinned[0][0] <= step:
            self.space.unpin(heapq.heappop(self._pinned)[2], float(step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    num_starts = room.NUM_STARTS
    outcomes = []
    print("| mix | scheme | used | rows hit | evictions | us | max ms | full |")
    print("|---|---|---|---|---|---|---|---|")
    for mix in MIXES:
        for scheme in SCHEMES:
            room.NUM_STARTS = num_starts if "neighbours" in scheme else 0
            outcome = Simulation(mix, scheme, options.seed).run(options.steps)
            outcomes.append(outcome)
            print(_row(outcome), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))


def _row(outcome: Outcome) -> str:
    cells = (
        outcome.mix,
        outcome.scheme,
        f"{outcome.used:.3f}",
        f"{outcome.rows_hit:.4f}",
        f"{outcome.evictions:.2f}",
        f"{outcome.mean_us:.0f}",
        f"{outcome.max_ms:.1f}",
        str(outcome.num_full),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
