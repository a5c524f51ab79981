"""Block pool: free blocks of the region, allocated in contiguous ranges only. Pure."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks [start, start + num_blocks)."""

    start: int
    num_blocks: int

    @property
    def end(self) -> int:
        return self.start + self.num_blocks


class BestFitPool:
    """Best fit: the smallest free range that is large enough, lowest address first.

    Neighbouring free ranges are joined at once. Allocation and freeing cost O(log n) in the number of
    free ranges, plus a move inside one sorted list.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_free_blocks = 0
        self._by_start: dict[int, int] = {}  # start -> num_blocks
        self._by_end: dict[int, int] = {}  # end -> start
        self._by_size: list[tuple[int, int]] = []  # (num_blocks, start), sorted
        self.restore(())

    @property
    def num_free_blocks(self) -> int:
        return self._num_free_blocks

    def try_allocate(self, num_blocks: int) -> BlockRange | None:
        """A free range of exactly `num_blocks`, or None."""
        index = bisect_left(self._by_size, (num_blocks, 0))
        if num_blocks < 1 or index == len(self._by_size):
            return None
        size, start = self._by_size[index]
        self._remove(start, size)
        if size > num_blocks:
            self._insert(start + num_blocks, size - num_blocks)
        self._num_free_blocks -= num_blocks
        return BlockRange(start, num_blocks)

    def free(self, blocks: BlockRange) -> None:
        """Return a whole allocated range.

        Raises:
            ValueError: part of it is free already, or outside the pool.
        """
        start, num_blocks = blocks.start, blocks.num_blocks
        if start < 0 or num_blocks < 1 or blocks.end > self.num_blocks or start in self._by_start:
            raise ValueError(f"{blocks} is not allocated")
        before = self._by_end.get(start)
        after = self._by_start.get(blocks.end)
        if before is not None:
            num_blocks += start - before
            self._remove(before, start - before)
            start = before
        if after is not None:
            self._remove(blocks.end, after)
            num_blocks += after
        self._insert(start, num_blocks)
        self._num_free_blocks += blocks.num_blocks

    def restore(self, allocated: Iterable[BlockRange]) -> None:
        """Replace all allocations by these ranges, in ascending order and without overlap.

        Raises:
            ValueError: they overlap, or are not in order, or outside the pool.
        """
        self._by_start, self._by_end, self._by_size, self._num_free_blocks = {}, {}, [], 0
        start = 0
        for blocks in (*allocated, BlockRange(self.num_blocks, 0)):
            if blocks.start < start or blocks.end > self.num_blocks:
                raise ValueError(f"{blocks} overlaps another range, or the end of the pool")
            if blocks.start > start:
                self._insert(start, blocks.start - start)
                self._num_free_blocks += blocks.start - start
            start = blocks.end

    def largest_free_range(self) -> int:
        """Blocks in the largest free range; 0 when nothing is free."""
        return self._by_size[-1][0] if self._by_size else 0

    def num_free_from(self, start: int) -> int:
        """Blocks in the free range that starts at `start`; 0 when none does."""
        return self._by_start.get(start, 0)

    def num_free_before(self, end: int) -> int:
        """Blocks in the free range that ends at `end`; 0 when none does."""
        return end - self._by_end.get(end, end)

    def _insert(self, start: int, num_blocks: int) -> None:
        self._by_start[start] = num_blocks
        self._by_end[start + num_blocks] = start
        insort(self._by_size, (num_blocks, start))

    def _remove(self, start: int, num_blocks: int) -> None:
        del self._by_start[start]
        del self._by_end[start + num_blocks]
        del self._by_size[bisect_left(self._by_size, (num_blocks, start))]
