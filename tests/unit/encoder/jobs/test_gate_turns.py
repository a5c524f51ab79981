"""Flows and classes take turns at the gate, whatever is in hand."""

import pytest

from triptych_common.domain.fair_queue import FairKey
from triptych_common.protocol.messages import EncodeClass
from triptych_encoder.jobs.gate_policy import FLOW_MEMORY_S, LEAD_SHARE, MAX_BATCHES, GateItem, GatePolicy

NUM_SLOTS = 8


def item(request: str, at: float, flow: str, encode_class: EncodeClass = EncodeClass.INTERACTIVE) -> GateItem:
    return GateItem(frozenset({(request, 0)}), at, at + 60.0, FairKey(encode_class, flow))


def in_engine(policy: GatePolicy) -> list[GateItem]:
    return [each for batch in iter(policy.take_batch, []) for each in batch]


def test_an_item_of_another_flow_goes_next_however_much_is_in_hand_before_it() -> None:
    policy = GatePolicy(encode_batch=1)
    for number in range(NUM_SLOTS):
        flood = item(f"flood-{number}", 0.0, "f")
        policy.add_item(flood)
        policy.set_ready(flood)
    computed = in_engine(policy)
    assert len(computed) == MAX_BATCHES
    late = item("one", 5.0, "1")
    policy.add_item(late)
    policy.set_ready(late)
    assert policy.is_next(late)
    policy.remove_item(computed[0])
    assert policy.take_batch() == [late]


def test_interactive_items_go_before_those_of_a_batch_and_those_before_files() -> None:
    policy = GatePolicy(encode_batch=1)
    busy = item("busy", 0.0, "x")
    for each in (
        busy,
        late := item("file", 0.0, "a", EncodeClass.AHEAD),
        middle := item("batch", 1.0, "a", EncodeClass.BATCH),
        first := item("now", 2.0, "a"),
    ):
        policy.add_item(each)
    policy.set_ready(busy)
    assert policy.take_batch() == [busy]
    for each in (late, middle, first):
        policy.set_ready(each)
    order = []
    for _ in range(3):
        order += in_engine(policy)
        policy.remove_item(busy if len(order) == 1 else order[-2])
    assert order == [first, middle, late]


def test_the_next_goes_to_the_engine_shortly_before_it_is_idle() -> None:
    """So what comes meanwhile may still go before it."""
    policy = GatePolicy(encode_batch=2)
    first, second = (item(f"flood-{number}", 0.0, "f") for number in range(2))
    for each in (first, second):
        each.seconds = 1.0
        policy.add_item(each)
    policy.set_ready(first)
    assert policy.take_batch(10.0) == [first]
    policy.set_ready(second)
    assert policy.take_batch(10.5) == []
    assert policy.held_until == pytest.approx(11.0 - LEAD_SHARE)
    other = item("one", 10.6, "1")
    policy.add_item(other)
    policy.set_ready(other)
    assert policy.take_batch(10.6) == []
    assert policy.take_batch(policy.held_until or 0.0) == [other, second]
    assert policy.held_until is None


@pytest.mark.parametrize(
    ("seconds", "other_at", "waits"),
    [(0.2, 9.0, True), (0.05, 9.0, False), (0.2, 10.1 - FLOW_MEMORY_S, False)],
)
def test_of_several_flows_the_next_goes_when_the_engine_is_idle(
    seconds: float, other_at: float, waits: bool
) -> None:
    """But where encodes are short, or the other flow had its latest item long ago."""
    policy = GatePolicy(encode_batch=1)
    other = item("one", other_at, "1")
    policy.add_item(other)
    policy.remove_item(other)
    first, second = (item(f"flood-{number}", 10.0, "f") for number in range(2))
    for each in (first, second):
        each.seconds = seconds
        policy.add_item(each)
        policy.set_ready(each)
    assert policy.take_batch(10.0) == [first]
    assert policy.take_batch(10.0 + 0.99 * seconds) == ([] if waits else [second])
    assert policy.held_until is None
    if waits:
        policy.remove_item(first)
        assert policy.take_batch(10.3) == [second]


def test_batches_are_gathered_while_several_flows_wait() -> None:
    policy = GatePolicy(encode_batch=2)
    items = [item(f"{number}", 10.0, f"{number % 2}") for number in range(4)]
    for each in items:
        each.seconds = 1.0
        policy.add_item(each)
        policy.set_ready(each)
    assert len(policy.take_batch(10.0)) == 2
    assert policy.take_batch(10.5) == []
    assert len(policy.take_batch(policy.held_until or 0.0)) == 2


def test_nothing_is_held_back_from_an_idle_engine_or_without_a_prediction() -> None:
    policy = GatePolicy(encode_batch=1)
    items = [item(f"flood-{number}", 0.0, "f") for number in range(3)]
    items[2].seconds = 1.0
    for each in items:
        policy.add_item(each)
        policy.set_ready(each)
    assert policy.take_batch(10.0) == items[:1]
    assert policy.take_batch(10.0) == items[1:2]
    for each in items[:2]:
        policy.remove_item(each)
    assert policy.take_batch(10.0) == items[2:]
    assert policy.held_until is None
