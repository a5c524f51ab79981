"""Ratios of paired repeats, with bootstrap confidence intervals. Pure.

A repeat measures every system one after another, so that a slow phase of the machine hits all of them: the
ratio of a pair varies much less than its parts. The figure is the median of the pairs' ratios; its interval
is the percentile bootstrap of that median (Efron and Tibshirani, An Introduction to the Bootstrap, 13.3).

Systems that were started anew between repeats differ from start to start, more than their repeats do. Then
starts are drawn first, and repeats within each (Davison and Hinkley, Bootstrap Methods and their Application,
3.8): the interval says what further starts would bring.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 12


@dataclass(frozen=True)
class Interval:
    """Figure with the bounds of its 95 % interval; all NaN if nothing was measured."""

    middle: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})" if self.num_pairs else "–"


def ratio_interval(values: Sequence[float], bases: Sequence[float], num_starts: int = 1) -> Interval:
    """Interval of `values` ÷ `bases`, pair by pair; pairs with a NaN or two zeros do not count.

    `num_starts`: number of starts that the pairs are of, equally many of each, one after the other.

    Raises:
        ValueError: they are not pairs.
    """
    return median_interval([_ratio(*pair) for pair in zip(values, bases, strict=True)], num_starts)


def _ratio(value: float, base: float) -> float:
    if math.isnan(value + base) or not (value or base):
        return math.nan
    return value / base if base else math.inf


def median_interval(values: Sequence[float], num_starts: int = 1) -> Interval:
    """Median of `values` with its interval, deterministic; NaNs do not count.

    `num_starts`: see `ratio_interval`.
    """
    by_start = [
        [value for value in part if not math.isnan(value)]
        for part in np.asarray(values, dtype=np.float64).reshape(num_starts, -1).tolist()
    ]
    starts = [np.asarray(part) for part in by_start if part]
    if not starts:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    everything = np.concatenate(starts)
    medians = _resampled(everything) if len(starts) == 1 else _resampled_by_start(starts)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="nearest")
    return Interval(float(np.median(everything)), float(low), float(high), len(everything))


def _resampled(data: Values) -> Values:
    """Medians of draws from `data` [n]."""
    picks = np.random.default_rng(SEED).integers(0, len(data), (NUM_RESAMPLES, len(data)))
    medians: Values = np.median(data[picks], axis=1)
    return medians


def _resampled_by_start(starts: Sequence[Values]) -> Values:
    """Medians of draws of starts, and of repeats within each start."""
    rng = np.random.default_rng(SEED)
    num_repeats = np.asarray([len(part) for part in starts])
    repeats = np.arange(num_repeats.max())
    padded = np.full((len(starts), len(repeats)), np.nan)
    for row, part in zip(padded, starts, strict=True):
        row[: len(part)] = part
    drawn = rng.integers(0, len(starts), (NUM_RESAMPLES, len(starts), 1))
    picks = rng.integers(0, num_repeats[drawn], (NUM_RESAMPLES, len(starts), len(repeats)))
    values = np.where(repeats < num_repeats[drawn], padded[drawn, picks], np.nan)
    medians: Values = np.nanmedian(values.reshape(NUM_RESAMPLES, -1), axis=1)
    return medians
