"""Score by free room in an instance's KV cache, as it announces."""

from collections.abc import Sequence

from triptych_gateway.routing.scheduling.candidates import Candidate, RoutingRequest


class KvScorer:
    """Free share of the KV cache; 1 without an announcement."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        return [1.0 if each.kv_usage is None else 1.0 - each.kv_usage for each in candidates]
