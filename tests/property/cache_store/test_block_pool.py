"""The block pool against a plain map of blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from triptych_cache_store.entries.block_pool import BestFitPool, BlockRange

NUM_BLOCKS = 40


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 45))))
def test_it_agrees_with_a_map(steps: list[tuple[bool, int]]) -> None:
    pool, taken = BestFitPool(NUM_BLOCKS), [False] * NUM_BLOCKS
    ranges: list[BlockRange] = []
    for allocates, number in steps:
        if allocates:
            found = pool.try_allocate(number)
            fitting = [size for _, size in free_ranges(taken) if size >= number]
            assert (found is not None) == bool(fitting and number)
            if found is not None:
                assert found.num_blocks == number
                assert size_around(taken, found.start) == min(fitting)
                assert not any(taken[found.start : found.end])
                taken[found.start : found.end] = [True] * number
                ranges.append(found)
        elif ranges:
            blocks = ranges.pop(number % len(ranges))
            pool.free(blocks)
            taken[blocks.start : blocks.end] = [False] * blocks.num_blocks
        check(pool, taken)
    copy = BestFitPool(NUM_BLOCKS)
    copy.restore(sorted(ranges, key=lambda blocks: blocks.start))
    check(copy, taken)


def free_ranges(taken: list[bool]) -> list[tuple[int, int]]:
    """(start, number of blocks) of each."""
    found: list[tuple[int, int]] = []
    for block, is_taken in enumerate(taken):
        if is_taken:
            continue
        if found and sum(found[-1]) == block:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return found


def size_around(taken: list[bool], block: int) -> int:
    return next(size for start, size in free_ranges(taken) if start <= block < start + size)


def check(pool: BestFitPool, taken: list[bool]) -> None:
    ranges = free_ranges(taken)
    assert pool.num_free_blocks == taken.count(False)
    assert pool.largest_free_range() == max((size for _, size in ranges), default=0)
    for start, size in ranges:
        assert pool.num_free_from(start) == size
        assert pool.num_free_before(start + size) == size


@pytest.mark.parametrize("blocks", [BlockRange(0, 0), BlockRange(-1, 2), BlockRange(39, 2), BlockRange(3, 1)])
def test_what_was_not_allocated_cannot_be_freed(blocks: BlockRange) -> None:
    pool = BestFitPool(NUM_BLOCKS)
    pool.try_allocate(3)
    with pytest.raises(ValueError, match="not allocated"):
        pool.free(blocks)


def test_overlapping_ranges_cannot_be_restored() -> None:
    with pytest.raises(ValueError, match="overlaps"):
        BestFitPool(NUM_BLOCKS).restore([BlockRange(0, 3), BlockRange(2, 3)])
