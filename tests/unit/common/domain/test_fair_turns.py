"""Whose turn it is: bounds that hold whatever comes."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from triptych_common.domain.fair_turns import MAX_PASSED, MAX_WAIT_TURNS, FairTurns, Lane, turn_cost
from triptych_common.protocol.messages import EncodeClass, ImageProperties, Modality

INTERACTIVE, BATCH, AHEAD = EncodeClass
MAX_COST = 4.0


def test_a_flow_that_comes_anew_waits_for_one_turn_of_another_at_most() -> None:
    turns, flood, one = FairTurns(), Lane(INTERACTIVE, "f"), Lane(INTERACTIVE, "1")
    for _ in range(1000):
        assert turns.next_lane([flood]) == flood
        turns.take_turn(flood, 1.0, [flood])
    assert turns.next_lane([flood, one]) == one


def test_a_flow_saves_nothing_up() -> None:
    turns, first, second = FairTurns(), Lane(INTERACTIVE, "a"), Lane(INTERACTIVE, "b")
    for _ in range(100):
        turns.take_turn(first, 1.0, [first])
    got = Counter[Lane]()
    for _ in range(20):
        lane = turns.next_lane([first, second])
        turns.take_turn(lane, 1.0, [first, second])
        got[lane] += 1
    assert got == {first: 10, second: 10}


def test_a_lower_class_goes_on_after_so_many_turns_of_others() -> None:
    turns, lanes = FairTurns(), [Lane(each) for each in EncodeClass]
    order = []
    for _ in range(100):
        lane = turns.next_lane(lanes)
        turns.take_turn(lane, 1.0, lanes)
        order.append(lane.encode_class)
    assert order[: MAX_PASSED + 1] == [INTERACTIVE] * MAX_PASSED + [BATCH]
    assert Counter(order)[INTERACTIVE] >= 70


def test_what_a_turn_costs_grows_with_the_image() -> None:
    def cost(side: int) -> float:
        return turn_cost(Modality.IMAGE, ImageProperties(format="PNG", width=side, height=side))

    assert cost(4000) == 16.0
    assert 0 < cost(1) < cost(1000) == 1.0
    assert turn_cost(Modality.VIDEO, None) > turn_cost(Modality.AUDIO, None) > 0


@given(
    steps=st.lists(
        st.tuples(st.sets(st.integers(0, 4), min_size=1), st.floats(0.25, MAX_COST)), min_size=1, max_size=200
    )
)
def test_two_flows_that_both_wait_get_the_same_up_to_one_turn_of_each(
    steps: list[tuple[set[int], float]],
) -> None:
    """Start-time fair queueing's bound; flows come and go, and costs are any."""
    turns = FairTurns()
    got: dict[tuple[int, int], list[float]] = {}  # by pair, since both wait without a break
    for waiting, cost in steps:
        lanes = {flow: Lane(INTERACTIVE, str(flow)) for flow in sorted(waiting)}
        pairs = {(a, b) for a in waiting for b in waiting if a < b}
        got = {pair: got.get(pair, [0.0, 0.0]) for pair in pairs}
        lane = turns.next_lane(list(lanes.values()))
        turns.take_turn(lane, cost, list(lanes.values()))
        for pair, amounts in got.items():
            for place, flow in enumerate(pair):
                amounts[place] += cost if lanes[flow] == lane else 0.0
            assert abs(amounts[0] - amounts[1]) <= 2 * MAX_COST + 1e-6


@given(waiting=st.lists(st.sets(st.sampled_from(EncodeClass), min_size=1), min_size=1, max_size=200))
def test_a_class_that_waits_gets_a_turn_in_so_many(waiting: list[set[EncodeClass]]) -> None:
    turns, waited = FairTurns(), dict.fromkeys(EncodeClass, 0)
    for classes in waiting:
        lanes = [Lane(each) for each in EncodeClass if each in classes]
        lane = turns.next_lane(lanes)
        turns.take_turn(lane, 1.0, lanes)
        for each in EncodeClass:
            waited[each] = waited[each] + 1 if each in classes and each is not lane.encode_class else 0
            assert waited[each] <= MAX_WAIT_TURNS
