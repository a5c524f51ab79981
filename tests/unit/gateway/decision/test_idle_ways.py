"""Both ways tried, then the quicker one; now and then the other."""

from triptych_gateway.decision.decision_policy import EncodeWay
from triptych_gateway.decision.idle_ways import (
    MARGIN,
    MAX_FIRST_TRIALS,
    NUM_FIRST_TRIALS,
    TRIAL_EVERY,
    IdleWays,
)

REMOTE, LOCAL = EncodeWay.REMOTE, EncodeWay.LOCAL


def tried(ways: IdleWays, remote_s: float, local_s: float, num_rows: float = 256.0) -> list[EncodeWay]:
    """The first trials, as they end."""
    trials: list[EncodeWay] = []
    for step in range(2 * NUM_FIRST_TRIALS):
        way = ways.trial()
        assert way is not None
        trials.append(way)
        ways.observe(way, num_rows, remote_s if way is REMOTE else local_s, float(step))
    return trials


def test_both_ways_are_tried_in_turn() -> None:
    ways = IdleWays()
    assert tried(ways, 1.0, 2.0) == [REMOTE, LOCAL] * NUM_FIRST_TRIALS
    assert ways.trial() is None


def test_the_quicker_one_is_chosen() -> None:
    for remote_s, local_s, best in ((1.0, 2.0, REMOTE), (2.0, 1.0, LOCAL)):
        ways = IdleWays()
        tried(ways, remote_s, local_s)
        assert ways.choose(256.0, 20.0) is best


def test_nearly_as_quick_is_no_reason_to_change() -> None:
    ways = IdleWays()
    tried(ways, 1.0, 1.0 - MARGIN / 2)
    assert ways.choose(256.0, 20.0) is REMOTE


def test_it_depends_on_the_rows() -> None:
    """Remote has more to begin with, and less for each row."""
    ways = IdleWays()
    for step in range(2 * NUM_FIRST_TRIALS):
        way = ways.trial()
        assert way is not None
        num_rows = 256.0 * (1 + step // 2)
        ways.observe(way, num_rows, 0.2 + 0.001 * num_rows if way is REMOTE else 0.0015 * num_rows, 0.0)
    assert ways.choose(100.0, 1.0) is LOCAL
    assert ways.choose(2000.0, 1.0) is REMOTE


def test_rows_that_were_encoded_there_cost_nothing() -> None:
    ways = IdleWays()
    tried(ways, 1.0, 2.0)
    assert ways.choose(256.0, 20.0, local_share=0.25) is LOCAL


def test_without_knowledge_encoders_encode() -> None:
    assert IdleWays().choose(256.0, 0.0) is REMOTE


def test_trials_that_show_nothing_end() -> None:
    ways = IdleWays()
    trials = [ways.trial() for _ in range(2 * MAX_FIRST_TRIALS)]
    assert trials.count(LOCAL) == trials.count(REMOTE) == MAX_FIRST_TRIALS
    assert ways.trial() is None


def test_the_other_way_is_tried_now_and_then_and_may_win() -> None:
    ways = IdleWays()
    tried(ways, 1.0, 2.0)
    for _ in range(40):  # the machine has changed
        trials = [ways.trial() for _ in range(TRIAL_EVERY)]
        assert [each for each in trials if each is not None] == [LOCAL]
        ways.observe(LOCAL, 256.0, 0.5, 20.0)
    assert ways.choose(256.0, 20.0) is LOCAL
