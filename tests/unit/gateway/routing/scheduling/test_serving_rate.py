"""ServingRate: seconds that one instance takes for requests, from their ends."""

import pytest

from tests.support.gateway.routing import load_of, record_of, request
from triptych_gateway.routing.scheduling.instance_state import (
    FIRST_REQUEST_S,
    ITEM_TOKENS,
    MIN_BUSY,
    MIN_ENDS,
    InstanceState,
    ServingRate,
)

BUSY = MIN_BUSY + 2


def busy_rate(seconds: float, num_tokens: float) -> ServingRate:
    rate = ServingRate()
    for number in range(MIN_ENDS + 1):
        rate.end_request(99.0, num_tokens, BUSY, number * seconds)
    return rate


def test_nothing_measured_counts_each_request() -> None:
    rate = ServingRate()
    assert rate.request_s(3) == 3 * FIRST_REQUEST_S
    assert rate.prompt_s(1e6, 3) == 3 * FIRST_REQUEST_S


def test_a_busy_instance_is_measured_from_end_to_end() -> None:
    rate = busy_rate(0.1, 50)
    assert rate.request_s(10) == pytest.approx(1.0)
    assert rate.prompt_s(500, 10) == pytest.approx(1.0)


def test_the_time_before_a_lull_is_no_measure() -> None:
    rate = busy_rate(0.1, 50)
    rate.end_request(0.1, 50, 1, 10.0)
    rate.end_request(0.1, 50, BUSY, 1000.0)
    assert rate.request_s(10) == pytest.approx(1.0)


def test_until_it_was_busy_the_requests_own_time_counts() -> None:
    rate = ServingRate()
    rate.end_request(0.5, 0, 1, 10.0)
    assert rate.request_s(4) == pytest.approx(2.0)
    assert rate.prompt_s(0, 4) == pytest.approx(2.0), "no prompt has had a token"


def test_requests_that_wait_for_encoders_are_no_work_of_the_instance() -> None:
    state = InstanceState()
    asked = [request(num_prompt_bytes=400) for _ in range(4)]
    record = record_of("a", load=load_of(1, num_running=1, num_waiting=3))
    state.observe(record, 0.0)
    for each in asked:
        state.begin_request(each, 0.0)
    assert state.waiting(record, 0, 1.0).decode_s == pytest.approx(3 * FIRST_REQUEST_S)
    assert state.waiting(record, 3, 1.0).decode_s == 0.0
    assert state.waiting(record, 2, 1.0).decode_s == pytest.approx(1 * FIRST_REQUEST_S)


def test_waiting_prompts_count_by_their_tokens_and_items() -> None:
    state, record = InstanceState(), record_of("a", load=load_of(1, num_running=0, num_waiting=1))
    state.observe(record, 0.0)
    text, image = request(num_prompt_bytes=4 * ITEM_TOKENS), request(items=("h",))
    state.begin_request(text, 0.0)
    state.end_request(text, 2.0)
    state.begin_request(image, 3.0)
    assert state.waiting(record, 0, 3.0).prefill_s == pytest.approx(2.0)


def test_another_gateways_requests_are_not_counted_here() -> None:
    state, record = InstanceState(), record_of("a", load=load_of(1, num_running=2, num_waiting=2))
    state.observe(record, 0.0)
    state.begin_request(request(), 0.0)
    assert state.waiting(record, 0, 1.0).decode_s == pytest.approx(0.5 * FIRST_REQUEST_S)


def test_an_old_load_is_none() -> None:
    state, record = InstanceState(), record_of("a", load=load_of(1, num_waiting=2))
    state.observe(record, 0.0)
    state.begin_request(request(), 0.0)
    assert state.waiting(record, 0, 100.0).decode_s == 0.0
