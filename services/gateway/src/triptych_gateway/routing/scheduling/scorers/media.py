"""The request's items that an instance was sent before: its caches may hold their tensors or tokens."""

from collections.abc import Sequence

from triptych_gateway.routing.scheduling.candidates import Candidate, RoutingRequest


class MediaScorer:
    """The share of them; 0 for all where the request has none."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        items = set(request.items)
        if not items:
            return [0.0] * len(candidates)
        return [sum(map(each.holds_item, items)) / len(items) for each in candidates]
