"""Histogram of latencies without a clock or a registry, for pure code."""

from bisect import bisect_left
from dataclasses import dataclass, field

BOUNDS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(slots=True)
class Latencies:
    """Counts of latencies by upper bound (`BOUNDS_S`, then infinity)."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds
