"""Room in an instance's KV cache, as it says."""

from collections.abc import Sequence

from triptych_gateway.routing.scheduling.candidates import Candidate, RoutingRequest


class KvScorer:
    """1: nothing of it is in use, or it does not say."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        return [1.0 if each.kv_usage is None else 1.0 - each.kv_usage for each in candidates]
