"""Both ways tried, then the quicker one; now and then the other."""

import pytest

from triptych_gateway.decision.decision_policy import EncodeWay
from triptych_gateway.decision.namespace_decisions import (
    MAX_AGE_S,
    MAX_FIRST_TRIALS,
    NUM_COLD,
    NUM_FIRST_TRIALS,
    TRIAL_EVERY,
    TRIAL_SHARE,
    IdleWays,
)

REMOTE, LOCAL = EncodeWay.REMOTE, EncodeWay.LOCAL
ROWS = 256.0


def tried(ways: IdleWays, remote_s: float, local_s: float) -> list[EncodeWay]:
    """The first trials, as they end."""
    trials: list[EncodeWay] = []
    for step in range(2 * NUM_FIRST_TRIALS):
        choice = ways.choose(ROWS, float(step))
        assert choice.is_trial
        trials.append(choice.way)
        ways.observe(choice.way, ROWS, remote_s if choice.way is REMOTE else local_s, float(step))
    return trials


def test_both_ways_are_tried_in_turn() -> None:
    ways = IdleWays()
    assert tried(ways, 1.0, 2.0) == [REMOTE, LOCAL] * NUM_FIRST_TRIALS
    assert not ways.choose(ROWS, 20.0).is_trial


@pytest.mark.parametrize(("remote_s", "local_s", "best"), [(1.0, 2.0, REMOTE), (2.0, 1.0, LOCAL)])
def test_the_quicker_one_is_chosen(remote_s: float, local_s: float, best: EncodeWay) -> None:
    ways = IdleWays()
    tried(ways, remote_s, local_s)
    assert ways.choose(ROWS, 20.0).way is best


def test_an_engines_first_encodes_do_not_count() -> None:
    ways = IdleWays()
    for step in range(2 * NUM_FIRST_TRIALS):
        way = ways.choose(ROWS, 0.0).way
        local_s = 9.0 if step < 2 * NUM_COLD else 0.5
        ways.observe(way, ROWS, 1.0 if way is REMOTE else local_s, float(step))
    assert ways.choose(ROWS, 20.0).way is LOCAL


def test_a_choice_of_one_size_binds_no_other() -> None:
    """Remote is much quicker for many rows, and hardly slower for few."""
    ways = IdleWays()
    for step in range(2 * NUM_FIRST_TRIALS):
        num_rows = ROWS if step // 2 % 2 else 16 * ROWS
        way = ways.choose(num_rows, 0.0).way
        remote_s = 1.0 if num_rows == ROWS else 10.0
        local_s = 0.98 if num_rows == ROWS else 15.0
        ways.observe(way, num_rows, remote_s if way is REMOTE else local_s, 0.0)
    for _ in range(3):
        assert ways.choose(16 * ROWS, 1.0, may_try=False).way is REMOTE
        assert ways.choose(ROWS, 1.0, may_try=False).way is LOCAL


def test_it_depends_on_the_rows() -> None:
    """Remote has more to begin with, and less for each row."""
    ways = IdleWays()
    for step in range(2 * NUM_FIRST_TRIALS):
        num_rows = ROWS * (1 + step // 2 % 4)
        way = ways.choose(num_rows, 0.0).way
        ways.observe(way, num_rows, 0.2 + 0.001 * num_rows if way is REMOTE else 0.0015 * num_rows, 0.0)
    assert ways.choose(100.0, 1.0).way is LOCAL
    assert ways.choose(2000.0, 1.0).way is REMOTE


def test_rows_that_were_encoded_there_cost_nothing() -> None:
    ways = IdleWays()
    tried(ways, 1.0, 2.0)
    assert ways.choose(ROWS, 20.0, local_share=0.25).way is LOCAL


def test_nothing_is_tried_where_nothing_would_be_learned() -> None:
    choice = IdleWays().choose(ROWS, 0.0, may_try=False)
    assert (choice.way, choice.is_trial) == (REMOTE, False)


def test_trials_that_show_nothing_end() -> None:
    ways = IdleWays()
    trials = [ways.choose(ROWS, 0.0) for _ in range(2 * MAX_FIRST_TRIALS)]
    assert all(each.is_trial for each in trials)
    assert not ways.choose(ROWS, 0.0).is_trial


def trials_of(ways: IdleWays, num: int) -> list[EncodeWay]:
    choices = [ways.choose(ROWS, 20.0) for _ in range(num)]
    return [each.way for each in choices if each.is_trial]


def test_the_other_way_is_tried_now_and_then_and_may_win() -> None:
    ways = IdleWays()
    tried(ways, 1.0, 1.05)
    for _ in range(40):  # the machine has changed
        if trials_of(ways, TRIAL_EVERY) != [LOCAL]:
            break
        ways.observe(LOCAL, ROWS, 0.5, 20.0)
    assert ways.choose(ROWS, 20.0).way is LOCAL


@pytest.mark.parametrize("local_s", [1.1, 1.5, 3.0])
def test_trials_of_a_slow_way_cost_a_bounded_share(local_s: float) -> None:
    ways = IdleWays()
    tried(ways, 1.0, local_s)
    trials = trials_of(ways, 1000)
    assert trials
    assert set(trials) == {LOCAL}
    assert len(trials) * (local_s - 1.0) <= TRIAL_SHARE * 1000 * 1.001
    assert len(trials) <= 1000 / TRIAL_EVERY


def test_after_a_long_time_both_are_tried_again() -> None:
    ways = IdleWays()
    tried(ways, 2.0, 1.0)
    later = MAX_AGE_S + 100.0
    for step in range(2 * NUM_FIRST_TRIALS):
        way = ways.choose(ROWS, later + step).way
        ways.observe(way, ROWS, 2.0 if way is REMOTE else 1.0, later + step)
    assert ways.choose(ROWS, later + 100.0).way is LOCAL


def test_a_way_of_which_the_trials_showed_nothing_is_tried_now_and_then() -> None:
    ways = IdleWays()
    for _ in range(2 * MAX_FIRST_TRIALS):
        if ways.choose(ROWS, 0.0).way is REMOTE:
            ways.observe(REMOTE, ROWS, 2.0, 0.0)
    for _ in range(20):
        trials = trials_of(ways, TRIAL_EVERY)
        for way in trials:
            ways.observe(way, ROWS, 1.0, 20.0)
    assert ways.choose(ROWS, 20.0, may_try=False).way is LOCAL
