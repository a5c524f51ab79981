"""Who takes the next entry of a group."""

from hypothesis import given
from hypothesis import strategies as st

from triptych_common.bus.fair_share import GroupLoad, must_let_go_first, num_owed

PEERS = frozenset({"b", "c"})


def test_what_waits_is_for_those_that_hold_fewer() -> None:
    assert must_let_go_first(GroupLoad(1, {"a": 2, "b": 1, "c": 2}), PEERS, 2)
    assert must_let_go_first(GroupLoad(2, {"a": 1}), PEERS, 1)  # neither ever had one


def test_more_than_they_are_owed_is_for_all() -> None:
    assert not must_let_go_first(GroupLoad(3, {"a": 1}), PEERS, 1)


def test_nothing_is_left_to_equals_or_where_nothing_waits() -> None:
    assert not must_let_go_first(GroupLoad(1, {"a": 1, "b": 1, "c": 1}), PEERS, 1)
    assert not must_let_go_first(GroupLoad(0, {"a": 5}), PEERS, 5)


def test_those_that_are_gone_are_owed_nothing() -> None:
    assert num_owed(GroupLoad(9, {"a": 3, "gone": 0}), frozenset({"b"}), 3) == 3


@given(
    held=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    num_entries=st.integers(0, 30),
    data=st.data(),
)
def test_whoever_comes_first_all_end_up_with_equal_shares(
    held: list[int], num_entries: int, data: st.DataObject
) -> None:
    """And one of them may always go on."""
    names = [f"e{n}" for n in range(len(held))]
    num_held = dict(zip(names, held, strict=True))
    for num_waiting in range(num_entries, 0, -1):
        load = GroupLoad(num_waiting, num_held)
        may = [
            each for each in names if not must_let_go_first(load, frozenset(names) - {each}, num_held[each])
        ]
        assert may
        num_held[data.draw(st.sampled_from(may))] += 1
    water = max(min(num_held.values()) + 1, *held)
    assert max(num_held.values()) <= water
