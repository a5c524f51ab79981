"""What a link is predicted to take, and when it is avoided."""

import time

import pytest

from triptych_gateway.transfers.fabric_view import AVOIDED_S, UNKNOWN_RATE, LinkRates

AB, BA = ("store-a", "store-b"), ("store-b", "store-a")


def test_each_link_has_its_own_rate() -> None:
    rates = LinkRates()
    for second in range(5):
        rates.observe(AB, 10_000_000, 0.1, float(second))
        rates.observe(BA, 10_000_000, 2.0, float(second))
    assert rates.seconds(AB, 1_000_000, 5.0) == pytest.approx(0.01)
    assert rates.seconds(BA, 1_000_000, 5.0) == pytest.approx(0.2)
    assert rates.is_measured(AB, 5.0)


def test_one_without_an_estimate_is_taken_to_be_slow() -> None:
    rates = LinkRates()
    assert rates.seconds(AB, int(UNKNOWN_RATE), 0.0) == 1.0
    for second in range(5):
        rates.observe(AB, 0, 0.001, float(second))  # the target had it: nothing was sent
    assert not rates.is_measured(AB, 5.0)


def test_one_that_failed_is_avoided_for_a_while_or_until_it_works() -> None:
    rates = LinkRates()
    rates.avoid(AB, 100.0)
    assert rates.is_avoided(AB, 100.0 + AVOIDED_S - 0.1)
    assert not rates.is_avoided(AB, 100.0 + AVOIDED_S)
    assert not rates.is_avoided(BA, 100.0)
    rates.avoid(AB, 200.0)
    rates.observe(AB, 1, 0.1, 201.0)
    assert not rates.is_avoided(AB, 201.0)


def test_who_chooses_by_the_seconds_avoids_it_too() -> None:
    rates = LinkRates()
    assert rates.measured_s(*AB, 1_000_000) is None
    rates.avoid(AB, time.monotonic())
    unmeasured_s = rates.measured_s(*AB, 1_000_000)
    assert unmeasured_s is not None
    assert AVOIDED_S <= unmeasured_s < 2 * AVOIDED_S
    rates.observe(AB, 10_000_000, 0.1, time.monotonic())
    rates.observe(AB, 10_000_000, 0.1, time.monotonic())
    works_s = rates.measured_s(*AB, 1_000_000)
    assert works_s is None or works_s < 1.0
    rates.avoid(AB, time.monotonic())
    avoided_s = rates.measured_s(*AB, 1_000_000)
    assert avoided_s is not None
    assert avoided_s >= AVOIDED_S
