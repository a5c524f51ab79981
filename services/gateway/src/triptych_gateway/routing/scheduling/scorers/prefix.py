"""How much of the prompt an instance was sent before: about what its prefix cache has.

A small share counts for nothing: a beginning that all prompts have alike would bring all of them to one
instance.
"""

from collections.abc import Sequence

from triptych_gateway.routing.scheduling.candidates import Candidate, RoutingRequest

MIN_SHARE = 0.25


class PrefixScorer:
    """1: all of it."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        shares = [each.prefix_share(request.prompt) for each in candidates]
        return [share if share >= MIN_SHARE else 0.0 for share in shares]
