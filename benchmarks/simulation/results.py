"""Figures of one run: times to the first token, rates, and how busy each part was."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from simulation.requests import Request


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


@dataclass(frozen=True)
class Shares:
    """Share of the run's time that each part was busy; of the busiest of its kind, if there is no mean.

    An engine is always busy, so what counts is what its steps take beyond an empty one.
    """

    gateway: float = 0.0
    media: float = 0.0
    redis: float = 0.0
    store: float = 0.0
    link: float = 0.0
    encoder: float = 0.0  # mean
    hottest_encoder: float = 0.0
    preprocess: float = 0.0  # mean
    engine: float = 0.0  # mean

    def first(self) -> tuple[str, float]:
        """Name and share of the busiest part."""
        return max(asdict(self).items(), key=lambda each: float(each[1]))


@dataclass
class Results:
    """Requests that arrived from `warm_s` on. Seconds."""

    warm_s: float
    end_s: float
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    gap_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # mean of a request
    num_ended: int = 0  # within the run, whenever they arrived
    num_tokens: int = 0  # of these
    num_answered: int = 0
    num_arrived: int = 0  # with open arrivals
    num_unanswered: int = 0
    encoder_s: float = 0.0  # seconds of all encoders, their starts too
    shares: Shares = field(default_factory=Shares)

    def add(self, request: Request, client_s: float) -> None:
        if self.warm_s <= request.ended_s < self.end_s:
            self.num_ended += 1
            self.num_tokens += request.num_output
        if request.arrived_s < self.warm_s:
            return
        self.num_answered += 1
        name = request.kind.name
        self.ttft_s[name].append(request.first_token_s - request.arrived_s + client_s)
        if request.num_output > 1:
            self.gap_s[name].append((request.ended_s - request.first_token_s) / (request.num_output - 1))

    def ttft_ms(self, share: float, name: str | None = None) -> float:
        values = self.ttft_s[name] if name else [v for each in self.ttft_s.values() for v in each]
        return percentile(values, share) * 1e3

    def gap_ms(self, share: float, name: str | None = None) -> float:
        values = self.gap_s[name] if name else [v for each in self.gap_s.values() for v in each]
        return percentile(values, share) * 1e3

    @property
    def requests_per_s(self) -> float:
        """Answers that ended within the run."""
        return self.num_ended / (self.end_s - self.warm_s)

    @property
    def keeps_up(self) -> bool:
        """Every request was answered, soon after the last arrival at the latest."""
        return self.num_unanswered == 0
