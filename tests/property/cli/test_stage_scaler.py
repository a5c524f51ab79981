"""StageScaler under any work: bounds, cooldowns, and an end to all changes when the work is steady."""

from hypothesis import given
from hypothesis import strategies as st

from triptych_cli.roles import Bounds
from triptych_cli.supervisor.autoscaler import TOLERANCE, ScalingRules, StageScaler, StageSignal

RULES = ScalingRules(target_s=4.0, cooldown_s=60.0, cooldown_starts=3.0)
STEP_S = 5.0

bounds = st.tuples(st.integers(0, 4), st.integers(0, 6)).map(lambda each: Bounds(each[0], each[0] + each[1]))
waiting = st.floats(0.0, 1e4, allow_nan=False)
usage = st.none() | st.floats(0.0, 1.0)
signals = st.builds(StageSignal, waiting, usage)


@given(bounds, st.booleans(), st.lists(st.tuples(signals, st.integers(0, 10)), max_size=60))
def test_the_number_keeps_to_the_bounds_whatever_comes(
    limits: Bounds, is_encode: bool, work: list[tuple[StageSignal, int]]
) -> None:
    scaler = StageScaler(RULES, is_encode=is_encode)
    for step, (signal, present) in enumerate(work):
        number = scaler.decide(signal, present, min(present, 3), 1.0, limits, step * STEP_S)
        assert limits.low <= number <= limits.high


@given(st.lists(waiting, min_size=1, max_size=60), st.floats(0.0, 60.0))
def test_none_ends_that_was_wanted_within_the_cooldown(work: list[float], start_s: float) -> None:
    scaler, limits, number = StageScaler(RULES, is_encode=True), Bounds(0, 8), 0
    cooldown_s = max(RULES.cooldown_s, RULES.cooldown_starts * start_s)
    seen: list[tuple[float, float]] = []
    for step, waiting_s in enumerate(work):
        now = step * STEP_S
        seen.append((now, waiting_s))
        before, number = number, scaler.decide(StageSignal(waiting_s), number, number, start_s, limits, now)
        if number < before:
            recent = [each for at, each in seen if at >= now - cooldown_s]
            assert max(recent) <= number * RULES.target_s * (1 + TOLERANCE)


@given(waiting, st.integers(0, 8))
def test_under_steady_work_the_number_settles(waiting_s: float, present: int) -> None:
    scaler, limits, number, numbers = StageScaler(RULES, is_encode=True), Bounds(0, 8), present, []
    for step in range(60):
        number = scaler.decide(StageSignal(waiting_s), number, number, 0.0, limits, step * STEP_S)
        numbers.append(number)
    changes = sum(before != after for before, after in zip([present, *numbers], numbers, strict=False))
    assert changes <= 1
    assert number == scaler.decide(StageSignal(waiting_s), number, number, 0.0, limits, 60 * STEP_S)
