"""Whose turn it is: bounds that hold whatever comes."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from triptych_common.domain.fair_queue import MAX_PASSED, MAX_WAIT_SLOTS, FairKey, FairQueue, slot_cost
from triptych_common.protocol.messages import EncodeClass, ImageProperties, Modality

INTERACTIVE, BATCH, _ = EncodeClass
MAX_COST = 4.0


def test_a_lower_class_goes_on_after_so_many_turns_of_others() -> None:
    turns, keys = FairQueue(), [FairKey(each) for each in EncodeClass]
    order = []
    for _ in range(100):
        key = turns.next_key(keys)
        turns.take_slot(key, 1.0, keys)
        order.append(key.encode_class)
    assert order[: MAX_PASSED + 1] == [INTERACTIVE] * MAX_PASSED + [BATCH]
    assert Counter(order)[INTERACTIVE] >= 70


def test_what_a_turn_costs_grows_with_the_image() -> None:
    def cost(side: int) -> float:
        return slot_cost(Modality.IMAGE, ImageProperties(format="PNG", width=side, height=side))

    assert cost(4000) == 16.0
    assert 0 < cost(1) < cost(1000) == 1.0
    assert slot_cost(Modality.VIDEO, None) > slot_cost(Modality.AUDIO, None) > 0


@given(
    steps=st.lists(
        st.tuples(st.sets(st.integers(0, 4), min_size=1), st.floats(0.25, MAX_COST)), min_size=1, max_size=200
    )
)
def test_two_flows_that_both_wait_get_the_same_up_to_one_turn_of_each(
    steps: list[tuple[set[int], float]],
) -> None:
    """Start-time fair queueing's bound; flows come and go, and costs are any."""
    turns = FairQueue()
    got: dict[tuple[int, int], list[float]] = {}  # by pair, since both wait without a break
    for waiting, cost in steps:
        keys = {flow: FairKey(INTERACTIVE, str(flow)) for flow in sorted(waiting)}
        pairs = {(a, b) for a in waiting for b in waiting if a < b}
        got = {pair: got.get(pair, [0.0, 0.0]) for pair in pairs}
        key = turns.next_key(list(keys.values()))
        turns.take_slot(key, cost, list(keys.values()))
        for pair, amounts in got.items():
            for place, flow in enumerate(pair):
                amounts[place] += cost if keys[flow] == key else 0.0
            assert abs(amounts[0] - amounts[1]) <= 2 * MAX_COST + 1e-6


@given(waiting=st.lists(st.sets(st.sampled_from(EncodeClass), min_size=1), min_size=1, max_size=200))
def test_a_class_that_waits_gets_a_turn_in_so_many(waiting: list[set[EncodeClass]]) -> None:
    turns, waited = FairQueue(), dict.fromkeys(EncodeClass, 0)
    for classes in waiting:
        keys = [FairKey(each) for each in EncodeClass if each in classes]
        key = turns.next_key(keys)
        turns.take_slot(key, 1.0, keys)
        for each in EncodeClass:
            waited[each] = waited[each] + 1 if each in classes and each is not key.encode_class else 0
            assert waited[each] <= MAX_WAIT_SLOTS
