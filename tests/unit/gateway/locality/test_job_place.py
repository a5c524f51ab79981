"""Near encoders while they keep up; others where these are done sooner, transfer included."""

from collections.abc import Callable

import pytest

from triptych_gateway.locality.encode_stores import (
    LEAST_SPARE_S,
    MOST_SPARE_S,
    JobPlace,
    PlaceReason,
    choose_place,
)

LEAST_MS, MOST_MS = int(LEAST_SPARE_S * 1000), int(MOST_SPARE_S * 1000)


def takes(seconds: float) -> Callable[[str], float]:
    return lambda store: seconds


@pytest.mark.parametrize(
    ("near_s", "elsewhere_s", "transfer_s", "store", "reason"),
    [
        (0.0, 0.0, 0.1, "a", PlaceReason.NEAR),
        (0.1, 0.0, 0.1, "a", PlaceReason.NEAR),  # no later than elsewhere
        (0.11, 0.0, 0.1, "b", PlaceReason.LESS_BUSY),
        (5.0, 4.0, 2.0, "a", PlaceReason.NEAR),
        (5.0, 4.0, 0.5, "b", PlaceReason.LESS_BUSY),
    ],
)
def test_near_encoders_until_others_are_done_sooner(
    near_s: float, elsewhere_s: float, transfer_s: float, store: str, reason: PlaceReason
) -> None:
    place = choose_place({"a": near_s, "b": elsewhere_s}, "a", takes(transfer_s))
    assert (place.store, place.reason) == (store, reason)


def test_the_nearest_of_others_by_its_link() -> None:
    transfers = {"b": 3.0, "c": 0.2}
    place = choose_place({"a": 9.0, "b": 0.0, "c": 0.5}, "a", transfers.__getitem__)
    assert (place.store, place.reason) == ("c", PlaceReason.LESS_BUSY)


def test_a_near_job_is_left_to_near_encoders_for_as_long_as_its_transfer_would_take() -> None:
    transfers = {"b": 3.0, "c": 1.5}
    assert choose_place({"a": 0.0, "b": 0.0, "c": 0.0}, "a", transfers.__getitem__).spare_after_ms == 1500
    assert choose_place({"a": 0.0, "b": 0.0}, "a", takes(0.001)).spare_after_ms == LEAST_MS
    assert choose_place({"a": 0.0, "b": 0.0}, "a", takes(300.0)).spare_after_ms == MOST_MS


def test_a_job_that_went_elsewhere_is_soon_for_anyone() -> None:
    place = choose_place({"a": 9.0, "b": 0.0}, "a", takes(3.0))
    assert place == JobPlace("b", PlaceReason.LESS_BUSY, LEAST_MS, 3.0)


def test_one_store_is_the_only_place() -> None:
    assert choose_place({"a": 99.0}, "b", takes(3.0)) == JobPlace("a", PlaceReason.ONLY_PLACE, LEAST_MS, 3.0)
    assert choose_place({"a": 99.0}, "a", takes(3.0)) == JobPlace("a", PlaceReason.ONLY_PLACE, LEAST_MS)


@pytest.mark.parametrize("target", [None, "c"])
def test_without_a_near_encoder_the_least_wait_and_travel(target: str | None) -> None:
    place = choose_place({"a": 0.5, "b": 0.2}, target, takes(1.0))
    assert place == JobPlace("b", PlaceReason.ANYWHERE, LEAST_MS, 0.0 if target is None else 1.0)
    assert choose_place({"a": 0.2, "b": 0.2}, target, takes(1.0)).store == "a"  # of equals the first by name


def test_what_was_asked_for_near_is_left_to_near_encoders_for_long() -> None:
    place = choose_place({"a": 99.0, "b": 0.0}, "a", takes(0.0), only_near="a")
    assert place == JobPlace("a", PlaceReason.NEAR_FAILED, MOST_MS)


def test_where_none_is_near_any_other_has_it() -> None:
    place = choose_place({"b": 0.0, "c": 1.0}, "a", takes(0.0), only_near="a")
    assert (place.store, place.reason) == ("b", PlaceReason.ANYWHERE)
