"""Bounds on the options of requests."""

from typing import Any

import pytest
from pydantic import ValidationError

from triptych_common.domain.media_options import OptionBounds, refused_option

RULES = {
    "min_pixels": OptionBounds(min=4, max=100),
    "max_pixels": OptionBounds(min=4, max=1000),
    "scale": OptionBounds(min=0.5, max=2.0),
    "mode": OptionBounds(values=("RGB", None, [0, 0, 0], 1)),
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_pixels": 4},
        {"max_pixels": 1000},
        {"min_pixels": 50, "max_pixels": 50},
        {"scale": 1},
        {"scale": 1.5},
        {"mode": "RGB"},
        {"mode": None},
        {"mode": [0, 0, 0]},
        {"mode": 1},
    ],
)
def test_within_the_bounds(options: dict[str, Any]) -> None:
    assert refused_option(options, RULES) is None


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"patch_size": 7}, "patch_size"),
        ({"max_pixels": 50, "patch_size": 7}, "patch_size"),
        ({"max_pixels": 3}, "max_pixels"),
        ({"max_pixels": 1001}, "max_pixels"),
        ({"max_pixels": 10**400}, "max_pixels"),
        ({"max_pixels": 50.0}, "max_pixels"),
        ({"max_pixels": float("nan")}, "max_pixels"),
        ({"max_pixels": True}, "max_pixels"),
        ({"max_pixels": "50"}, "max_pixels"),
        ({"max_pixels": None}, "max_pixels"),
        ({"max_pixels": [50]}, "max_pixels"),
        ({"max_pixels": {"max_pixels": 50}}, "max_pixels"),
        ({"min_pixels": 60, "max_pixels": 50}, "min_pixels"),
        ({"max_pixels": 50, "min_pixels": 60}, "min_pixels"),
        ({"scale": float("inf")}, "scale"),
        ({"scale": 10**400}, "scale"),
        ({"mode": "rgb"}, "mode"),
        ({"mode": True}, "mode"),
        ({"mode": 1.0}, "mode"),
        ({"mode": [0, 0]}, "mode"),
        ({"x" * 1000: 1}, "x" * 50),
    ],
)
def test_beyond_them(options: dict[str, Any], name: str) -> None:
    refusal = refused_option(options, RULES)
    assert refusal is not None
    assert refusal.name == name


def test_without_rules_every_option_is_refused() -> None:
    refusal = refused_option({"a": 1}, {})
    assert refusal is not None


@pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"min": 1},
        {"max": 1},
        {"min": 2, "max": 1},
        {"min": 1, "max": 2, "values": [1]},
        {"values": []},
        {"min": True, "max": 3},
        {"min": "1", "max": 3},
        {"min": 0.0, "max": float("inf")},
        {"min": 0.0, "max": float("nan")},
        {"min": 0, "max": 1, "most": 2},
    ],
)
def test_bounds_that_bound_nothing_are_no_setting(bounds: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OptionBounds.model_validate(bounds)
