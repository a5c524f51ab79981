"""StageScaler: how many instances of a stage there should be."""

import pytest

from triptych_cli.roles import Bounds
from triptych_cli.supervisor.autoscaler import ScalingRules, StageScaler, StageSignal

RULES = ScalingRules(target_s=4.0, cooldown_s=60.0, cooldown_starts=2.0)
BOUNDS = Bounds(0, 5)


class Stage:
    """A stage whose instances start and end at once."""

    def __init__(self, num: int = 0, *, is_encode: bool = True, bounds: Bounds = BOUNDS) -> None:
        self.scaler = StageScaler(RULES, is_encode=is_encode)
        self.num, self.bounds = num, bounds

    def at(self, now: float, waiting_s: float, *, kv: float | None = None, start_s: float = 0.0) -> int:
        signal = StageSignal(waiting_s, kv)
        self.num = self.scaler.decide(signal, self.num, self.num, start_s, self.bounds, now)
        return self.num


@pytest.mark.parametrize(
    ("waiting_s", "expected"), [(0.0, 0), (0.001, 1), (4.0, 1), (4.1, 2), (12.0, 3), (1e6, 5)]
)
def test_encoders_are_the_quotient_rounded_up_within_the_bounds(waiting_s: float, expected: int) -> None:
    assert Stage().at(0.0, waiting_s) == expected


def test_a_small_excess_changes_nothing() -> None:
    stage = Stage(3)
    assert stage.at(0.0, 3 * 4.0 * 1.09) == 3
    assert stage.at(1.0, 3 * 4.0 * 1.11) == 4


def test_a_long_start_makes_a_long_cooldown() -> None:
    stage = Stage(1)
    assert stage.at(0.0, 0.0, start_s=100.0) == 1
    assert stage.at(199.0, 0.0, start_s=100.0) == 1
    assert stage.at(201.0, 0.0, start_s=100.0) == 0


def test_the_first_look_ends_nothing() -> None:
    assert Stage(3).at(0.0, 0.0) == 3


def test_language_models_grow_by_what_waits_beside_those_that_work() -> None:
    stage = Stage(2, is_encode=False, bounds=Bounds(1, 5))
    assert stage.at(0.0, 8.0) == 4
    scaler = StageScaler(RULES, is_encode=False)
    starting = scaler.decide(StageSignal(8.0), 4, 2, 0.0, Bounds(1, 9), 0.0)
    assert starting == 4, "those that start are for the same work"


@pytest.mark.parametrize(("kv", "expected"), [(0.1, 1), (0.34, 1), (0.36, 2), (None, 2)])
def test_a_language_model_ends_if_the_others_have_room(kv: float | None, expected: int) -> None:
    stage = Stage(2, is_encode=False, bounds=Bounds(1, 5))
    stage.at(0.0, 0.0, kv=kv)
    assert stage.at(61.0, 0.0, kv=kv) == expected


def test_bounds_hold_at_once() -> None:
    stage = Stage(5)
    stage.bounds = Bounds(1, 2)
    assert stage.at(0.0, 100.0) == 2
    stage.bounds = Bounds(3, 4)
    assert stage.at(1.0, 0.0) == 3


@pytest.mark.parametrize(
    ("text", "expected"), [("2", Bounds(2, 2)), ("0..3", Bounds(0, 3)), ("1..1", Bounds(1, 1))]
)
def test_bounds_are_parsed(text: str, expected: Bounds) -> None:
    assert Bounds.parse(text) == expected
    assert Bounds.parse(str(expected)) == expected


@pytest.mark.parametrize("text", ["", "..", "1..", "..3", "3..1", "-1", "1-3", "1.5", "²", "a"])
def test_other_bounds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither|begins above"):
        Bounds.parse(text)
