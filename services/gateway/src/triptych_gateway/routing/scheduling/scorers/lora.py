"""Score by recent use of the request's LoRA adapter at an instance.

All candidates have loaded it. vLLM keeps few of those where they compute, and copies another one there when
it is named.
"""

from collections.abc import Sequence

from triptych_gateway.routing.scheduling.candidates import Candidate, RoutingRequest


class LoraScorer:
    """Score 1 for recent use, and for all if the request names no adapter."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        return [
            float(request.model == each.record.model or each.used_adapter(request.model))
            for each in candidates
        ]
