"""Who takes the next entry of a group."""

import heapq
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from triptych_common.bus.fair_share import Consumers, GroupLoad, Peer


def test_those_that_are_gone_are_owed_nothing() -> None:
    assert Consumers({"b": Peer()}).num_owed(GroupLoad(9, {"a": 3, "gone": 0}), "a", 3) == 3


def test_a_slow_one_leaves_to_a_fast_one_what_that_would_finish_sooner() -> None:
    group = Consumers({"slow": Peer(5.0, 8), "fast": Peer(1.0, 8)})
    assert group.num_owed(GroupLoad(1, {"fast": 3}), "slow", 0) == 1  # its fourth ends before ours
    assert group.num_owed(GroupLoad(1, {"fast": 4}), "slow", 0) == 0  # and its fifth does not
    assert group.num_owed(GroupLoad(9, {"fast": 7}), "slow", 3) == 1  # it takes no more than its slots
    assert group.num_owed(GroupLoad(1, {"slow": 0}), "fast", 4) == 0


def test_unknown_speeds_count_as_equal() -> None:
    group = Consumers({"a": Peer(5.0, 8), "b": Peer(None, 8)})
    assert group.num_owed(GroupLoad(9, {"b": 0}), "a", 2) == 2


@given(
    held=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    speeds=st.lists(st.sampled_from([None, 0.5, 1.0, 7.0]), min_size=5, max_size=5),
    num_entries=st.integers(0, 30),
    data=st.data(),
)
def test_one_of_them_may_always_go_on_and_equals_end_up_with_equal_shares(
    held: list[int], speeds: list[float | None], num_entries: int, data: st.DataObject
) -> None:
    names = [f"e{n}" for n in range(len(held))]
    num_held = dict(zip(names, held, strict=True))
    group = Consumers({name: Peer(speed) for name, speed in zip(names, speeds, strict=False)})
    for num_waiting in range(num_entries, 0, -1):
        load = GroupLoad(num_waiting, num_held)
        may = [each for each in names if not group.must_let_go_first(load, each, num_held[each])]
        assert may
        num_held[data.draw(st.sampled_from(may))] += 1
    if len({peer.work_s for peer in group.peers.values()}) == 1:
        water = max(min(num_held.values()) + 1, *held)
        assert max(num_held.values()) <= water


def run_jobs(
    work_s: dict[str, float], arrivals: list[float], *, by_speed: bool, num_slots: int = 8
) -> list[float]:
    """Seconds that each job took, from its publication. Consumers ask in any order; slow ones first."""
    group = Consumers({name: Peer(s if by_speed else None, num_slots) for name, s in work_s.items()})
    held: dict[str, deque[float]] = {name: deque() for name in work_s}  # published at
    waiting: deque[float] = deque()
    events = [(at, 0, "") for at in arrivals]
    heapq.heapify(events)
    took = []
    while events:
        now, kind, name = heapq.heappop(events)
        if kind == 0:
            waiting.append(now)
        else:
            took.append(now - held[name].popleft())
            if held[name]:
                heapq.heappush(events, (now + work_s[name], 1, name))
        for name in sorted(work_s, key=lambda each: -work_s[each]):
            while waiting and len(held[name]) < num_slots:
                load = GroupLoad(len(waiting), {each: len(jobs) for each, jobs in held.items()})
                if group.must_let_go_first(load, name, len(held[name])):
                    break
                held[name].append(waiting.popleft())
                if len(held[name]) == 1:
                    heapq.heappush(events, (now + work_s[name], 1, name))
    return took


def test_a_slow_encoder_takes_no_job_that_a_fast_one_finishes_sooner() -> None:
    """One takes a fifth of the other's time. With little load none waits for the slow one; else it helps."""
    work_s = {"fast": 1.0, "slow": 5.0}
    light = [1.5 * n for n in range(60)]
    assert max(run_jobs(work_s, light, by_speed=False)) == 5.0
    assert max(run_jobs(work_s, light, by_speed=True)) == 1.0
    heavy = [0.9 * n for n in range(60)]  # more than the fast one can do alone
    by_number, by_speed = (run_jobs(work_s, heavy, by_speed=each) for each in (False, True))
    assert max(by_speed) <= 5.0 < 9.0 < max(by_number)
    at_once = [run_jobs(work_s, [0.0] * 40, by_speed=each) for each in (False, True)]
    assert [len(each) for each in at_once] == [40, 40], "none is left"
    assert sum(at_once[1]) <= sum(at_once[0])
