"""Flows and classes take turns at the gate, whatever is in hand."""

from triptych_common.domain.fair_turns import Lane
from triptych_common.protocol.messages import EncodeClass
from triptych_encoder.jobs.gate_policy import MAX_BATCHES, GateItem, GatePolicy

NUM_SLOTS = 8


def item(request: str, at: float, flow: str, encode_class: EncodeClass = EncodeClass.INTERACTIVE) -> GateItem:
    return GateItem(frozenset({(request, 0)}), at, at + 60.0, Lane(encode_class, flow))


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
