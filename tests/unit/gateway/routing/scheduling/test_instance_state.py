"""InstanceState: own requests exactly, those of other gateways as announced, and what was sent."""

import pytest

from tests.support.gateway.routing import load_of, record_of, request
from triptych_gateway.routing.scheduling.instance_state import LOAD_TTL_S, InstanceState
from triptych_gateway.routing.scheduling.profiles import score_prefix

TEXT = bytes(range(256)) * 4


def num_requests(state: InstanceState, now: float = 0.0, beat: int = 1) -> int:
    return state.as_candidate(record_of("a", load=load_of(beat)), now).num_requests


def test_others_requests_count_beside_the_own() -> None:
    state = InstanceState()
    state.begin_request(None)
    state.observe(record_of("a", load=load_of(1, num_running=3, num_waiting=2)), 0.0)
    assert num_requests(state) == 5, "one is this gateway's"
    state.begin_request(None)
    assert num_requests(state) == 6
    state.end_request(None)
    state.end_request(None)
    assert num_requests(state) == 4


def test_own_requests_that_ended_before_the_news_came_are_no_ones_else() -> None:
    state = InstanceState()
    for _ in range(3):
        state.begin_request(None)
    for _ in range(3):
        state.end_request(None)
    state.observe(record_of("a", load=load_of(1, num_running=3)), 0.0)
    assert num_requests(state) == 0
    state.observe(record_of("a", load=load_of(2, num_running=3)), 1.0)
    assert num_requests(state, 1.0) == 3, "since the heartbeat before there was none of its own"


def test_the_same_heartbeat_read_twice_is_no_news() -> None:
    state, record = InstanceState(), record_of("a", load=load_of(1, num_running=2))
    state.observe(record, 0.0)
    state.begin_request(None)
    state.observe(record, 0.5)
    assert num_requests(state, 0.5) == 3


def test_old_news_do_not_count() -> None:
    state = InstanceState()
    state.observe(record_of("a", load=load_of(1, num_running=2, kv_usage=0.9)), 0.0)
    record = record_of("a", load=load_of(1, num_running=2, kv_usage=0.9))
    assert state.as_candidate(record, LOAD_TTL_S - 0.1).kv_usage == pytest.approx(0.9)
    late = state.as_candidate(record, LOAD_TTL_S)
    assert (late.num_requests, late.kv_usage) == (0, None)


def test_a_restarted_instance_has_nothing_of_what_was_sent() -> None:
    state, asked = InstanceState(), request(TEXT, items=("h",), num_prompt_bytes=9)
    state.observe(record_of("a", load=load_of(7, num_running=2)), 0.0)
    assert asked.prompt.blocks
    state.begin_request(asked)
    known = state.as_candidate(record_of("a", load=load_of(7, num_running=2)), 0.0)
    assert score_prefix(asked, [known])[0] > 0.8
    assert known.holds_item(asked.items[0])
    assert known.num_prompt_bytes == 9
    again = record_of("a", boot_id="c", load=load_of(1, num_running=4))
    state.observe(again, 1.0)
    new = state.as_candidate(again, 1.0)
    assert score_prefix(asked, [new]) == [0.0]
    assert not new.holds_item(asked.items[0])
    assert new.num_requests == 1 + 3, "its beats begin anew"
    state.end_request(asked)
    assert state.as_candidate(again, 1.0).num_prompt_bytes == 0


def test_the_announced_cache_bounds_what_is_remembered() -> None:
    state, asked = InstanceState(), request(TEXT)
    record = record_of("a", kv_cache_tokens=64)
    state.observe(record, 0.0)
    assert asked.prompt.num_bytes == 1024
    state.begin_request(asked)
    assert state.as_candidate(record, 0.0).prefix_share(asked.prompt) == 0.25


def test_a_prompt_that_nobody_read_is_not_read_for_it() -> None:
    def refuse() -> None:
        raise AssertionError("it is read only where there is a choice")

    state = InstanceState()
    state.begin_request(request(read_prompt=refuse))
    assert state.num_in_flight == 1


def test_what_had_no_answer_is_not_held_and_what_was_there_before_is() -> None:
    state, record = InstanceState(), record_of("a")
    state.observe(record, 0.0)
    before, failed = request(TEXT[:512], items=("h",)), request(TEXT, items=("h", "i"))
    assert before.prompt.blocks
    assert failed.prompt.blocks
    state.begin_request(before)
    state.end_request(before)
    state.begin_request(failed)
    known = state.as_candidate(record, 0.0)
    assert known.prefix_share(failed.prompt) == 1.0
    state.end_request(failed, is_computed=False)
    assert known.prefix_share(failed.prompt) == 0.5
    assert [known.holds_item(each) for each in failed.items] == [True, False]
    state.begin_request(failed)
    state.end_request(failed)
    assert known.prefix_share(failed.prompt) == 1.0
