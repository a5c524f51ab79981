"""Ratios of paired repeats, with bootstrap confidence intervals. Pure.

A repeat measures every system one after another, so that a slow phase of the machine hits all of them: the
ratio of a pair varies much less than its parts. The figure is the median of the pairs' ratios; its interval
is the percentile bootstrap of that median (Efron and Tibshirani, An Introduction to the Bootstrap, 13.3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 12


@dataclass(frozen=True)
class Interval:
    """A figure with the bounds of its 95 % interval; all NaN where nothing was measured."""

    middle: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})" if self.num_pairs else "–"


def ratio_interval(values: Sequence[float], bases: Sequence[float]) -> Interval:
    """Of `values` ÷ `bases`, pair by pair. Pairs with a NaN do not count, nor do two zeros.

    Raises:
        ValueError: they are not pairs.
    """
    ratios = []
    for value, base in zip(values, bases, strict=True):
        if not math.isnan(value + base) and (value or base):
            ratios.append(value / base if base else math.inf)
    return median_interval(ratios)


def median_interval(values: Sequence[float]) -> Interval:
    """The median of `values` with its interval; the same for the same values."""
    if not values:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    data = np.asarray(values, dtype=np.float64)  # 1D
    picks = np.random.default_rng(SEED).integers(0, len(data), (NUM_RESAMPLES, len(data)))
    medians = np.median(data[picks], axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="nearest")
    return Interval(float(np.median(data)), float(low), float(high), len(data))
