"""The line through the latest observations."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych_gateway.decision.serving_costs import MAX_AGE_S, MIN_OBSERVATIONS, LinearCost

ANY = st.floats(allow_nan=True, allow_infinity=True)


def seen(*observations: tuple[float, float]) -> LinearCost:
    cost = LinearCost()
    for amount, seconds in observations:
        cost.observe(amount, seconds, 0.0)
    return cost


def test_few_observations_are_no_estimate() -> None:
    cost = seen(*[(1.0, 1.0)] * (MIN_OBSERVATIONS - 1))
    assert cost.line(0.0) is None
    cost.observe(1.0, 1.0, 0.0)
    assert cost.line(0.0) is not None


def test_base_and_slope_are_told_apart() -> None:
    line = seen(*[(x, 0.1 + 0.01 * x) for x in (10, 20, 40, 80)]).line(0.0)
    assert line is not None
    assert (line.base_s, line.per_unit_s) == pytest.approx((0.1, 0.01))


def test_equal_amounts_give_a_line_through_the_origin() -> None:
    line = seen((100, 2.0), (100, 2.0), (100, 2.0)).line(0.0)
    assert line is not None
    assert (line.base_s, line.per_unit_s) == (0.0, pytest.approx(0.02))


def test_large_amounts_do_not_drown_small_ones() -> None:
    """All within a tenth of the line."""
    line = seen(
        (100, 0.22), (100, 0.18), (1600, 1.87), (1600, 1.53), (100, 0.2), (1600, 1.53)
    ).line(0.0)  # fmt: skip
    assert line is not None
    assert line.seconds(100) == pytest.approx(0.2, rel=0.05)


def test_a_single_outlier_counts_little_and_a_change_is_followed() -> None:
    cost = seen(*[(100, 1.0)] * 50, (100, 1000.0))
    line = cost.line(0.0)
    assert line is not None
    assert line.seconds(100) < 1.3
    for _ in range(60):
        cost.observe(100, 4.0, 0.0)
    line = cost.line(0.0)
    assert line is not None
    assert line.seconds(100) == pytest.approx(4.0, rel=0.1)


def test_old_observations_are_forgotten() -> None:
    cost = seen(*[(100, 1.0)] * 10)
    assert cost.line(MAX_AGE_S + 1) is None
    cost.observe(100, 3.0, MAX_AGE_S + 1)
    assert cost.line(MAX_AGE_S + 1) is None


@given(st.lists(st.tuples(ANY, ANY), max_size=60))
def test_whatever_is_observed_an_estimate_is_finite_and_not_negative(
    observations: list[tuple[float, float]],
) -> None:
    """Seconds come from other processes too."""
    cost = LinearCost()
    for amount, seconds in observations:
        cost.observe(min(amount, 1e9), seconds, 0.0)
    line = cost.line(0.0)
    if line is not None:
        assert line.base_s >= 0
        assert line.per_unit_s >= 0
        assert math.isfinite(line.seconds(1000))
