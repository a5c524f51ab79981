"""Load points: rates, clients or replays for an endpoint. Pure.

Open loop: requests come at a rate, regardless of earlier ones; the gaps between them follow a gamma
distribution whose shape is the burstiness (1: a Poisson process; below 1: bursts). Closed loop: a number of
clients, each asking again when it was answered. Replay: requests come at a trace's times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Loop(StrEnum):
    OPEN = "open"
    CLOSED = "closed"
    REPLAY = "replay"


@dataclass(frozen=True)
class LoadPoint:
    loop: Loop
    request_rate: float = math.inf  # per second; inf: as fast as the clients ask
    burstiness: float = 1.0
    max_concurrency: int | None = None
    speed: float = 1.0  # of a replay: 2 is twice as fast as recorded

    @property
    def title(self) -> str:
        if self.loop is Loop.OPEN:
            shape = "Poisson" if self.burstiness == 1.0 else f"gamma {self.burstiness:g}"
            return f"{self.request_rate:g}/s, {shape}"
        return f"{self.max_concurrency} clients" if self.loop is Loop.CLOSED else f"replay × {self.speed:g}"

    @property
    def value(self) -> float:
        """Position of the point on a plot's axis."""
        if self.loop is Loop.OPEN:
            return self.request_rate
        return float(self.max_concurrency or 0) if self.loop is Loop.CLOSED else self.speed


def load_points(
    rates: Sequence[float], burstiness: float, clients: Sequence[int], speeds: Sequence[float]
) -> list[LoadPoint]:
    """One point for each value, open loops first.

    Raises:
        ValueError: a value is not above 0.
    """
    if any(value <= 0 for value in (*rates, burstiness, *clients, *speeds)):
        raise ValueError("rates, burstiness, clients and speeds must be above 0")
    points = [LoadPoint(Loop.OPEN, request_rate=rate, burstiness=burstiness) for rate in rates]
    points += [LoadPoint(Loop.CLOSED, max_concurrency=count) for count in clients]
    return points + [LoadPoint(Loop.REPLAY, speed=speed) for speed in speeds]
