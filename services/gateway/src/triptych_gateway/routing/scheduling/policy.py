"""RoutingPolicy: filters, scorers with weights, and a picker, for requests of one stage."""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych_gateway.routing.scheduling.candidates import (
    Candidate,
    Filter,
    Picker,
    RoutingRequest,
    ScoredCandidate,
    Scorer,
)
from triptych_gateway.routing.scheduling.decision import ONLY, RoutingDecision, reason_for
from triptych_gateway.routing.scheduling.filters import make_filter
from triptych_gateway.routing.scheduling.pickers import make_picker
from triptych_gateway.routing.scheduling.profiles import StageProfile
from triptych_gateway.routing.scheduling.scorers.table import SCORERS


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """Routing policy of one stage."""

    stage: str
    filters: tuple[Filter, ...]
    scorers: tuple[tuple[str, float, Scorer], ...]  # with name and weight, which is above 0
    picker: Picker

    @classmethod
    def of(cls, stage: str, profile: StageProfile) -> "RoutingPolicy":
        return cls(
            stage,
            tuple(make_filter(name, profile.full_above) for name in profile.filters),
            tuple((name, weight, SCORERS[name]) for name, weight in profile.weights.items() if weight),
            make_picker(profile.picker),
        )

    def decide(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> RoutingDecision:
        """Decide among `candidates`, not empty, each of which could serve the request."""
        kept = candidates
        for each in self.filters:
            kept = [candidate for candidate in kept if each.keeps(candidate)] or kept
        if len(candidates) == 1:
            return RoutingDecision(self.stage, ScoredCandidate(kept[0], {}), None, ONLY)
        parts: list[dict[str, float]] = [{} for _ in kept]
        for name, weight, scorer in self.scorers:
            for part, score in zip(parts, scorer.score(request, kept), strict=True):
                part[name] = weight * score
        scored = [ScoredCandidate(*each) for each in zip(kept, parts, strict=True)]
        chosen = self.picker.pick(scored)
        others = [each for each in scored if each is not chosen]
        runner_up = max(others, key=lambda each: each.total, default=None)
        share = chosen.candidate.prefix_share(request.prompt) if request.is_prompt_read else None
        return RoutingDecision(self.stage, chosen, runner_up, reason_for(chosen, runner_up), share)
