"""LinearCost: seconds as a line over an amount (rows, tokens), from the latest observations. Pure.

Least squares of relative errors, with weights that fade: an observation counts `FADE` ** (number of later
ones), so the memory is five numbers, and a machine that has become slower is noticed within some twenty
observations. Relative, since what takes long also varies by more: a tenth of sixteen images is more than one.
"""

import math
from dataclasses import dataclass

FADE = 0.95
MIN_OBSERVATIONS = 3  # fewer are no estimate
MAX_AGE_S = 600.0  # without an observation, after which the estimate is forgotten
MAX_SECONDS = 3600.0  # of one observation; also bounds what a peer may report
SMALLEST_AMOUNT = 1e-6  # smaller amounts count as none
LEAST_AMOUNT = 1.0  # smaller ones count no more than this
OUTLIER = 5.0  # times the estimate; larger observations count as that
MIN_SPREAD = 0.05  # of the amounts, relative: with less of it, the line goes through the origin


@dataclass(frozen=True, slots=True)
class Line:
    """Line of `base_s` seconds and `per_unit_s` for each unit. Neither is negative."""

    base_s: float
    per_unit_s: float

    def seconds(self, amount: float) -> float:
        return self.base_s + self.per_unit_s * amount


class LinearCost:
    """Estimator of a line; `now` is in monotonic seconds."""

    def __init__(self, max_age_s: float = MAX_AGE_S) -> None:
        self._max_age_s = max_age_s
        self._reset()

    def _reset(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._num = 0
        self._seen_at = float("-inf")

    def observe(self, amount: float, seconds: float, now: float) -> None:
        """Record one observation. Infinite, undefined and negative ones are ignored."""
        if not (math.isfinite(amount) and math.isfinite(seconds)) or amount < 0 or seconds < 0:
            return
        if now - self._seen_at > self._max_age_s:
            self._reset()
        seconds = min(seconds, MAX_SECONDS)
        estimate = self.line(now)
        if estimate is not None and (usual := estimate.seconds(amount)) > 0:
            seconds = min(seconds, OUTLIER * usual)
        weight = max(amount, LEAST_AMOUNT) ** -2
        self._weight = FADE * self._weight + weight
        self._x = FADE * self._x + weight * amount
        self._y = FADE * self._y + weight * seconds
        self._xx = FADE * self._xx + weight * amount * amount
        self._xy = FADE * self._xy + weight * amount * seconds
        self._num += 1
        self._seen_at = now

    def line(self, now: float) -> Line | None:
        """Return the estimate; None with too few observations, or none for a long time."""
        if self._num < MIN_OBSERVATIONS or now - self._seen_at > self._max_age_s:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        if mean_x < SMALLEST_AMOUNT:
            return Line(mean_y, 0.0)
        variance = self._xx / self._weight - mean_x * mean_x
        if variance <= (MIN_SPREAD * mean_x) ** 2:
            return Line(0.0, mean_y / mean_x)
        slope = (self._xy / self._weight - mean_x * mean_y) / variance
        if slope <= 0:
            return Line(mean_y, 0.0)
        base_s = mean_y - slope * mean_x
        if base_s < 0:
            return Line(0.0, self._xy / self._xx)
        return Line(base_s, slope)
