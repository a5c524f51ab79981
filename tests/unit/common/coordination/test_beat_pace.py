"""A record lives long enough for a process that gets a core seldom."""

from triptych_common.coordination.registry import MAX_TTL_S, NUM_PACED, BeatPace

INTERVAL_S, TTL_S = 1.0, 4.0


def test_the_time_to_live_follows_the_longest_delay_and_returns() -> None:
    pace, now = BeatPace(INTERVAL_S, TTL_S), 100.0
    assert pace.ttl_s(now) == TTL_S
    now += INTERVAL_S
    assert pace.ttl_s(now) == TTL_S
    now += INTERVAL_S + 3.0  # no core for three seconds
    assert pace.ttl_s(now) == TTL_S + 6.0
    for _ in range(NUM_PACED - 1):
        now += INTERVAL_S
        assert pace.ttl_s(now) == TTL_S + 6.0
    now += INTERVAL_S
    assert pace.ttl_s(now) == TTL_S


def test_the_time_to_live_is_bounded_and_never_shorter_than_asked() -> None:
    pace = BeatPace(INTERVAL_S, TTL_S)
    pace.ttl_s(0.0)
    assert pace.ttl_s(1000.0) == MAX_TTL_S
    assert BeatPace(INTERVAL_S, 2 * MAX_TTL_S).ttl_s(0.0) == 2 * MAX_TTL_S
