"""The overlap policy: how far a request may run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych_vllm_connector.consumer.overlap import NO_OVERLAP, OverlapPolicy, PromptPlace, Readiness

WAITS, PART, WHOLE = Readiness
POLICY = OverlapPolicy(min_tokens=10)


def place(start: int, end: int, *, is_granted: bool = True, is_here: bool = True) -> PromptPlace:
    return PromptPlace(start, end, is_granted, is_here)


def test_without_items_to_come_it_may_run() -> None:
    assert POLICY.readiness([], 0) is WHOLE
    assert POLICY.readiness([place(5, 9)], 0) is WHOLE
    assert POLICY.readiness([place(5, 9, is_granted=False, is_here=False)], 9) is WHOLE  # covered


@pytest.mark.parametrize(("computed", "expected"), [(0, PART), (10, PART), (11, WAITS), (20, WAITS)])
def test_text_in_front_of_a_missing_item(computed: int, expected: Readiness) -> None:
    assert POLICY.readiness([place(20, 24, is_here=False)], computed) is expected


def test_items_that_are_here_count_as_tokens() -> None:
    places = [place(2, 9), place(12, 19, is_here=False)]
    assert POLICY.readiness(places, 0) is PART
    assert POLICY.readiness(places, 2) is PART
    assert POLICY.readiness(places, 3) is WAITS


def test_nothing_begins_without_space() -> None:
    assert POLICY.readiness([place(50, 60, is_granted=False, is_here=False)], 0) is WAITS
    assert POLICY.readiness([place(50, 60, is_granted=False, is_here=True)], 0) is WAITS


def test_larger_than_the_budget_it_runs_with_all_that_it_was_granted() -> None:
    rest = place(8, 20, is_granted=False, is_here=False)
    assert POLICY.readiness([place(2, 6), rest], 0) is WHOLE
    assert POLICY.readiness([place(2, 6, is_here=False), rest], 0) is WAITS
    assert POLICY.readiness([place(2, 16), place(16, 20, is_here=False), rest], 0) is PART


def test_drafters_that_read_ahead_shorten_the_step() -> None:
    policy = OverlapPolicy(min_tokens=10, lookahead_tokens=1)
    assert policy.readiness([place(10, 14, is_here=False)], 0) is WAITS
    assert policy.readiness([place(11, 14, is_here=False)], 0) is PART


@st.composite
def prompts(draw: st.DrawFn) -> list[PromptPlace]:
    """Granted is a beginning of them; what has no space is not here."""
    places, end = [], 0
    num_granted = draw(st.integers(0, 6))
    for index, (gap, length) in enumerate(
        draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=6))
    ):
        start, end = end + gap, end + gap + length
        is_granted = index < num_granted
        places.append(PromptPlace(start, end, is_granted, is_granted and draw(st.booleans())))
    return places


@given(prompts(), st.integers(0, 300), st.integers(1, 60), st.integers(0, 3), st.booleans())
def test_part_is_worth_a_step_and_reads_nothing_that_is_missing(
    places: list[PromptPlace], computed: int, min_tokens: int, lookahead: int, begins_whole: bool
) -> None:
    policy = OverlapPolicy(min_tokens=min_tokens, lookahead_tokens=lookahead)
    readiness = policy.readiness(places, computed, begins_whole=begins_whole)
    needed = [each for each in places if each.end > computed]
    missing = [each for each in needed if not each.is_here]
    if readiness is PART:
        assert not begins_whole
        window = range(computed, min(each.start for each in missing) - lookahead)
        assert len(window) >= min_tokens
        assert all(each.is_here for each in needed if each.start < window.stop + lookahead)
    elif readiness is WHOLE:
        assert not needed or needed[0].is_granted
        assert not any(each.is_granted for each in missing)
    else:
        assert needed
    off = NO_OVERLAP.readiness(places, computed)
    assert off is (WAITS if readiness is PART else readiness) or begins_whole


@given(prompts(), st.integers(0, 300), st.integers(1, 60))
def test_what_comes_never_takes_readiness_away(
    places: list[PromptPlace], computed: int, min_tokens: int
) -> None:
    """So a request that was woken by one item is not put back by the next."""
    policy = OverlapPolicy(min_tokens=min_tokens)
    order = [WAITS, PART, WHOLE]
    before = policy.readiness(places, computed)
    for index, each in enumerate(places):
        if each.is_granted and not each.is_here:
            more = [*places[:index], PromptPlace(each.start, each.end, True, True), *places[index + 1 :]]
            assert order.index(policy.readiness(more, computed)) >= order.index(before)


def test_what_it_began_it_goes_on_with_however_little_is_left() -> None:
    missing = place(20, 24, is_here=False)
    assert POLICY.readiness([missing], 15) is WAITS
    assert POLICY.readiness([missing], 15, goes_on=True) is PART
    assert POLICY.readiness([missing], 20, goes_on=True) is WAITS
