"""Partial requests: how many there may be, and who gives way first."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from triptych_vllm_connector.scheduler.partial_preemption import PartialRequests, newest


def with_room(max_blocks: int, max_seats: int, incomplete: set[str]) -> PartialRequests:
    return PartialRequests(max_blocks, max_seats, incomplete.__contains__)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40))), st.integers(0, 30), st.integers(0, 4))
def test_the_share_is_kept(wanted: list[tuple[int, int]], max_blocks: int, max_seats: int) -> None:
    names = {str(index) for index in range(len(wanted))}
    partial = with_room(max_blocks, max_seats, names)
    held = 0
    for index, (num_blocks, num_free) in enumerate(wanted):
        if partial.may_begin(num_blocks, num_free):
            assert num_blocks <= num_free
            partial.begin(str(index), num_blocks)
            held += num_blocks
            assert len(partial) == 1 or held <= max_blocks
    assert len(partial) <= max_seats


@dataclass(frozen=True)
class Came:
    arrival_time: float
    priority: int = 0


def test_the_newest_gives_way_first() -> None:
    first, last, important = Came(1, 5), Came(2, 0), Came(3, -1)
    assert newest([first, last, important], by_priority=False) is important
    assert newest([first, last, important], by_priority=True) is first
    assert newest([], by_priority=True) is None
