"""Score by few requests before this one, of all gateways."""

from collections.abc import Sequence

from triptych_gateway.routing.scheduling.candidates import Candidate, RoutingRequest

NUM_REQUESTS = 8  # excess over the least busy candidate at which the score is 0


class QueueScorer:
    """Score 1 for the candidate with the fewest requests in flight; less per request beyond it."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        fewest = min(each.num_requests for each in candidates)
        return [max(0.0, 1 - (each.num_requests - fewest) / NUM_REQUESTS) for each in candidates]
