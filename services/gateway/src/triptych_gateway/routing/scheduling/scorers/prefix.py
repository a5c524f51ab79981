"""Score by the share of the prompt that an instance was sent before: about its prefix cache.

A small share counts as 0: a beginning that all prompts share would bring all of them to one instance.
"""

from collections.abc import Sequence

from triptych_gateway.routing.scheduling.candidates import Candidate, RoutingRequest

MIN_SHARE = 0.25


class PrefixScorer:
    """Known share of the prompt; 1 is all of it."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        shares = [each.prefix_share(request.prompt) for each in candidates]
        return [share if share >= MIN_SHARE else 0.0 for share in shares]
