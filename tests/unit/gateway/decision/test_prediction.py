"""Seconds until the first token, either way."""

from dataclasses import replace

import pytest

from triptych_gateway.decision.instance_load import WorkAhead
from triptych_gateway.decision.prediction import (
    MAX_TEXT_DELAY_S,
    STALL_WEIGHT,
    Demand,
    EncoderQueue,
    Load,
    Prediction,
    predict,
)
from triptych_gateway.decision.serving_costs import Costs, Line

COSTS = Costs(
    encode=Line(0.0, 0.001), after_encode=Line(0.1, 0.0), local=Line(0.0, 0.002), prefill=Line(0.0, 0.0005)
)
ONE = Demand(num_items=1, num_rows=100, num_new_items=1, num_new_rows=100)
IDLE = Load(EncoderQueue(1))


def predicted(costs: Costs = COSTS, load: Load = IDLE, demand: Demand = ONE) -> Prediction:
    prediction = predict(costs, load, demand)
    assert prediction is not None
    return prediction


def test_without_costs_or_encoders_there_is_none() -> None:
    assert predict(Costs(), IDLE, ONE) is None
    assert predict(COSTS, Load(EncoderQueue(0)), ONE) is None


def test_on_an_idle_system() -> None:
    prediction = predicted()
    assert prediction.remote_s == pytest.approx(0.1 + 0.1)
    assert prediction.local_s == pytest.approx(0.2)
    assert (prediction.remote_burden_s, prediction.local_burden_s) == (0.0, 0.0)


def test_several_encoders_share_a_requests_items() -> None:
    four = Demand(4, 400, 4, 400)
    assert predicted(demand=four).encode_s == pytest.approx(0.4)
    assert predicted(demand=four, load=Load(EncoderQueue(2))).encode_s == pytest.approx(0.2)
    assert predicted(demand=four, load=Load(EncoderQueue(3))).encode_s == pytest.approx(0.2)
    assert predicted(demand=four, load=Load(EncoderQueue(9))).encode_s == pytest.approx(0.1)


def test_the_way_to_the_instances_store_counts() -> None:
    far = predicted(load=Load(EncoderQueue(1), transfers_s=(0.3,)))
    assert (far.encode_s, far.transfer_s) == (pytest.approx(0.1), pytest.approx(0.3))
    assert far.arrive_s == pytest.approx(0.4)
    assert far.remote_s == pytest.approx(0.5)
    assert far.local_s == predicted().local_s
    near = predicted(load=Load(EncoderQueue(1), transfers_s=(0.0,)))
    assert near == predicted()


@pytest.mark.parametrize(
    ("transfers_s", "num_encoders", "expected_s"),
    [
        ((0.05,) * 4, 1, 0.05),  # shorter than an encode: only the last one is left
        ((0.3,) * 4, 1, 0.1 + 4 * 0.3 - 0.4),  # longer: all of them, from the first encode on
        ((0.3, 0.0, 0.0, 0.0), 1, 0.3),  # the one that is far may be the last
        ((0.05,) * 4, 4, 4 * 0.05),  # all encoded at once
    ],
)
def test_transfers_go_while_later_items_are_encoded(
    transfers_s: tuple[float, ...], num_encoders: int, expected_s: float
) -> None:
    four = Demand(4, 400, 4, 400)
    load = Load(EncoderQueue(num_encoders), transfers_s=transfers_s)
    assert predicted(demand=four, load=load).transfer_s == pytest.approx(expected_s)


def test_text_and_work_at_the_instance_hide_a_transfer() -> None:
    load = Load(EncoderQueue(1), WorkAhead(((0.0, 1.0),)), transfers_s=(0.3,))
    assert predicted(load=load).remote_s == pytest.approx(1.1)
    assert predicted(
        demand=replace(ONE, num_text_tokens=1000), load=Load(EncoderQueue(1), transfers_s=(0.3,))
    ).remote_s == pytest.approx(0.6)


def test_a_queue_is_waited_for_and_its_first_items_are_half_done() -> None:
    assert predicted(load=Load(EncoderQueue(1, 3, 300, 3))).queue_s == pytest.approx(0.25)
    assert predicted(load=Load(EncoderQueue(3, 3, 300, 3))).queue_s == pytest.approx(0.05)


def test_text_is_computed_while_encoders_encode() -> None:
    text = replace(ONE, num_text_tokens=100)
    assert predicted(demand=text).remote_s == pytest.approx(0.2)
    assert predicted(demand=text).local_s == pytest.approx(0.25)
    assert predicted(demand=replace(ONE, num_text_tokens=400)).remote_s == pytest.approx(0.3)


def test_work_at_the_instance_is_before_both() -> None:
    busy = WorkAhead(((0.0, 1.0),))
    prediction = predicted(load=Load(EncoderQueue(1), busy, busy))
    assert prediction.remote_s == pytest.approx(1.1)
    assert prediction.local_s == pytest.approx(1.2)
    assert prediction.local_burden_s > 0


def test_streams_are_stalled_by_an_encode_at_their_instance() -> None:
    prediction = predicted(load=Load(EncoderQueue(1), num_streams=3))
    assert prediction.local_burden_s == pytest.approx(3 * STALL_WEIGHT * 0.1)
    assert prediction.remote_burden_s == 0.0


def test_items_that_are_known_cost_an_encode_at_the_instance_alone() -> None:
    half = Demand(num_items=2, num_rows=200, num_new_items=1, num_new_rows=100)
    assert predicted(demand=half).encode_s == pytest.approx(0.1)
    assert predicted(demand=half).local_s == pytest.approx(0.4)


def test_what_the_instance_has_encoded_before_costs_it_nothing() -> None:
    assert predicted(demand=replace(ONE, num_rows_here=100)).local_s == 0.0


def test_before_it_was_measured_an_encode_there_is_derived_from_the_encoders() -> None:
    unmeasured = predicted(replace(COSTS, local=None))
    assert not unmeasured.is_local_measured
    assert unmeasured.local_s == pytest.approx(0.1 + 0.1)
    assert predicted(replace(COSTS, local=None, prefill=None)).local_s == pytest.approx(0.2)


def test_small_items_are_encoded_where_they_are_needed_while_no_text_is_there() -> None:
    small = Demand(2, 2 * 1000 * MAX_TEXT_DELAY_S, 2, 2 * 1000 * MAX_TEXT_DELAY_S)
    assert predicted(demand=small).is_small
    larger = replace(small, num_rows=small.num_rows + 1)
    assert not predicted(demand=larger).is_small
    assert not predicted(demand=replace(small, num_rows=0)).is_small  # not known
    assert not predicted(demand=small, load=replace(IDLE, num_texts=1)).is_small
    assert predicted(demand=small, load=replace(IDLE, num_streams=1)).is_small
    beside = replace(IDLE, num_streams=2)
    assert not predicted(demand=small, load=beside).is_small
    assert predicted(demand=small, load=replace(beside, num_held=1)).is_small
    ahead = WorkAhead(((0.0, 1.0),))
    assert predicted(demand=small, load=replace(beside, local_ahead=ahead)).is_small


def test_on_a_slow_machine_items_are_small_whose_encode_takes_less_than_their_handover() -> None:
    """Other programs have the cores: both take ten times as long."""
    demand = Demand(2, 200, 2, 200)
    slow = replace(COSTS, encode=Line(0.0, 0.01), handover=Line(0.2, 0.0))
    assert not predicted(slow, demand=demand).is_small
    assert predicted(replace(slow, encode_alone=Line(0.0, 0.0019)), demand=demand).is_small
    assert not predicted(replace(slow, encode_alone=Line(0.0, 0.0021)), demand=demand).is_small
