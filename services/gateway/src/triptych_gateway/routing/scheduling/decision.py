"""RoutingDecision: the chosen instance, the runner-up, and the deciding score."""

from dataclasses import dataclass

from triptych_common.protocol.messages import InstanceRecord
from triptych_gateway.routing.scheduling.candidates import ScoredCandidate

ONLY, EQUAL, CHANCE = "only", "equal", "chance"  # reasons, besides the scorers' names
MAX_EXPLANATION = 400


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """Chosen instance, runner-up and reason of one choice."""

    stage: str
    chosen: ScoredCandidate
    runner_up: ScoredCandidate | None  # the best of the others that no filter left out
    reason: str  # scorer with the largest gain over the runner-up, or one of the above
    prefix_share: float | None = None  # share of the prompt sent before; None: not computed

    @property
    def record(self) -> InstanceRecord:
        return self.chosen.candidate.record

    @property
    def explanation(self) -> str:
        """Explanation for people: `pd-0 2.5 (prefix 1.5, queue 1); pd-1 1 (queue 1)`."""
        shown = [_shown(each) for each in (self.chosen, self.runner_up) if each is not None]
        return "; ".join(shown)[:MAX_EXPLANATION]


def _shown(scored: ScoredCandidate) -> str:
    parts = ", ".join(f"{name} {value:.3g}" for name, value in scored.parts.items() if value)
    total = f"{scored.candidate.record.instance} {scored.total:.3g}"
    return f"{total} ({parts})" if parts else total


def reason_for(chosen: ScoredCandidate, runner_up: ScoredCandidate | None) -> str:
    """Return the scorer that decided, or another reason."""
    if runner_up is None:
        return ONLY
    if chosen.total == runner_up.total:
        return EQUAL
    if chosen.total < runner_up.total:
        return CHANCE
    gains = {name: value - runner_up.parts[name] for name, value in chosen.parts.items()}
    return max(gains, key=lambda name: gains[name])
