"""Which item goes into vLLM next: order, batches, and who is not held back."""

import pytest

from triptych_encoder.jobs.gate_policy import (
    DEADLINE_LEAD_S,
    FIRST_LEAD_S,
    JOIN_LEAD_S,
    MAX_JOIN_LEAD_S,
    GateItem,
    GatePolicy,
)

FAR = 1e6


def item(*places: tuple[str, int], at: float = 0.0, deadline: float = FAR) -> GateItem:
    return GateItem(frozenset(places), at, deadline)


def in_hand(policy: GatePolicy, *items: GateItem, ready: bool = True) -> None:
    for each in items:
        policy.add_item(each)
        if ready:
            policy.set_ready(each)


def order_of(policy: GatePolicy) -> list[GateItem]:
    """All that is ready, as an engine gets it that is done with one item at a time."""
    found: list[GateItem] = []
    while batch := policy.take_batch():
        for each in batch:
            found.append(each)
            policy.remove_item(each)
    return found


@pytest.fixture
def policy() -> GatePolicy:
    return GatePolicy(encode_batch=1)


def test_the_first_item_of_each_request_goes_before_the_others_then_older_requests(
    policy: GatePolicy,
) -> None:
    old = [item(("old", index), at=0.0) for index in range(3)]
    young = [item(("young", index), at=1.0) for index in range(3)]
    in_hand(policy, *old, *young)
    assert order_of(policy) == [old[0], young[0], *old[1:], *young[1:]]


def test_while_the_engine_is_busy_the_item_that_is_due_first_is_waited_for(policy: GatePolicy) -> None:
    items = [item(("a", index)) for index in range(3)]
    in_hand(policy, items[0], items[2])
    in_hand(policy, items[1], ready=False)
    assert [policy.take_batch(), policy.take_batch()] == [[items[0]], []]
    policy.set_ready(items[1])
    assert policy.take_batch() == [items[1]]


def test_an_engine_that_becomes_idle_waits_for_nothing(policy: GatePolicy) -> None:
    items = [item(("a", index)) for index in range(3)]
    in_hand(policy, items[0], items[2])
    in_hand(policy, items[1], ready=False)
    assert [policy.take_batch(), policy.take_batch()] == [[items[0]], []]
    policy.remove_item(items[0])
    assert policy.take_batch() == [items[2]]


def test_an_item_that_an_idle_engine_passed_over_does_not_split_batches() -> None:
    policy = GatePolicy(encode_batch=4)
    slow, *others = [item((f"r{n}", 0), at=n / 100) for n in range(12)]
    in_hand(policy, slow, ready=False)
    in_hand(policy, *others)
    assert policy.take_batch() == others[:4]
    assert policy.take_batch() == others[4:8]  # while the first are computed
    for each in others[:4]:
        policy.remove_item(each)
    policy.set_ready(slow)
    assert policy.take_batch() == [slow, *others[8:]]


def test_what_was_not_passed_over_is_waited_for_still() -> None:
    policy = GatePolicy(encode_batch=4)
    items = [item((f"r{n}", 0), at=n / 100) for n in range(4)]
    in_hand(policy, items[0], items[2], ready=False)
    in_hand(policy, items[1])
    assert policy.take_batch() == [items[1]]
    in_hand(policy, items[3])
    assert policy.take_batch() == []
    policy.set_ready(items[2])
    assert policy.take_batch() == items[2:]


def test_a_large_first_item_stays_its_requests_first(policy: GatePolicy) -> None:
    large, small, other = item(("a", 0)), item(("a", 1)), item(("b", 0), at=0.5)
    in_hand(policy, large, ready=False)
    in_hand(policy, small, other)
    assert policy.take_batch() == [other]
    policy.set_ready(large)
    assert policy.take_batch() == [large]


def test_an_item_that_several_requests_wait_for_goes_earlier(policy: GatePolicy) -> None:
    alone = item(("a", 0), at=0.0)
    joined = item(("b", 0), ("c", 0), at=JOIN_LEAD_S / 2)
    in_hand(policy, alone, joined)
    assert order_of(policy) == [joined, alone]


def test_requests_that_join_later_count(policy: GatePolicy) -> None:
    alone, joined = item(("a", 0), at=0.0), item(("b", 0), at=JOIN_LEAD_S / 2)
    in_hand(policy, alone, joined)
    policy.set_places(joined, [("b", 0), ("c", 0)])
    assert order_of(policy) == [joined, alone]


def test_a_crowd_has_a_bounded_lead(policy: GatePolicy) -> None:
    alone = item(("a", 0), at=0.0)
    crowd = item(*((f"r{n}", 0) for n in range(100)), at=MAX_JOIN_LEAD_S + 0.1)
    in_hand(policy, alone, crowd)
    assert order_of(policy) == [alone, crowd]


def test_two_places_in_one_request_are_one_request(policy: GatePolicy) -> None:
    alone, twice = item(("a", 0), at=0.0), item(("b", 0), ("b", 1), at=JOIN_LEAD_S / 2)
    in_hand(policy, alone, twice)
    assert order_of(policy) == [alone, twice]


def test_a_near_deadline_goes_earlier(policy: GatePolicy) -> None:
    at_ease, hurried = item(("a", 0), at=0.0), item(("b", 0), at=1.0, deadline=0.5 + DEADLINE_LEAD_S - 1)
    in_hand(policy, at_ease, hurried)
    assert order_of(policy) == [hurried, at_ease]


def test_later_items_of_a_request_go_before_the_first_ones_of_much_younger_requests(
    policy: GatePolicy,
) -> None:
    old = [item(("old", index), at=0.0) for index in range(3)]
    young = [item((f"young{n}", 0), at=n * 0.6 * FIRST_LEAD_S) for n in range(1, 6)]
    in_hand(policy, *old, *young)
    assert order_of(policy) == [old[0], young[0], *old[1:], *young[1:]]


def test_the_first_item_goes_alone_into_an_idle_engine_and_the_rest_together() -> None:
    policy = GatePolicy(encode_batch=4)
    items = [item(("a", index)) for index in range(6)]
    in_hand(policy, *items)
    assert policy.take_batch() == items[:1]
    assert policy.take_batch() == items[1:5]
    assert policy.take_batch() == []
    policy.remove_item(items[0])
    assert policy.take_batch() == items[5:]


def test_what_waits_in_the_engine_is_filled_up() -> None:
    policy = GatePolicy(encode_batch=4)
    items = [item(("a", index)) for index in range(8)]
    in_hand(policy, *items[:3])
    assert [policy.take_batch(), policy.take_batch()] == [items[:1], items[1:3]]
    in_hand(policy, *items[3:])
    assert policy.take_batch() == items[3:5]
    assert policy.take_batch() == []


def test_requests_with_one_item_each_go_in_whole_batches() -> None:
    policy = GatePolicy(encode_batch=4)
    items = [item((f"r{n}", 0), at=n / 100) for n in range(12)]
    in_hand(policy, *items)
    assert policy.take_batch() == items[:4]
    assert policy.take_batch() == items[4:8]
    for each in items[:4]:
        policy.remove_item(each)
    assert policy.take_batch() == items[8:]


def test_a_batch_takes_no_longer_than_its_bound() -> None:
    policy = GatePolicy(encode_batch=8, longest_batch_s=0.1)
    items = [item((f"r{n}", 0), at=n / 100) for n in range(8)]
    for each, seconds in zip(items, (0.03, 0.03, 0.03, 0.03, 0.5, 0.02, 0.0, 0.02), strict=True):
        each.seconds = seconds
    in_hand(policy, *items)
    taken = []
    while batch := policy.take_batch():
        taken.append(batch)
        for each in batch:
            policy.remove_item(each)
    assert taken == [items[:3], [items[3]], [items[4]], [items[5]], [items[6]], [items[7]]]


def test_an_unstarted_batch_is_filled_up_to_its_bound() -> None:
    policy = GatePolicy(encode_batch=8, longest_batch_s=0.1)
    items = [item((f"r{n}", 0), at=n / 100) for n in range(5)]
    for each in items:
        each.seconds = 0.04
    in_hand(policy, *items[:2])
    assert policy.take_batch() == items[:2]
    in_hand(policy, items[2])
    assert policy.take_batch() == [items[2]]
    in_hand(policy, *items[3:])
    assert policy.take_batch() == [items[3]]
    assert policy.take_batch() == []


def test_the_next_of_all_in_hand_is_known_before_it_is_prepared(policy: GatePolicy) -> None:
    first, second = item(("a", 0)), item(("a", 1))
    in_hand(policy, second, first, ready=False)
    assert (policy.is_next(first), policy.is_next(second)) == (True, False)
    policy.set_ready(first)
    policy.take_batch()
    assert (policy.is_next(first), policy.is_next(second)) == (False, True)
