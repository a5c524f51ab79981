"""Score by the request's items that an instance was sent before: its caches may hold them."""

from collections.abc import Sequence

from triptych_gateway.routing.scheduling.candidates import Candidate, RoutingRequest


class MediaScorer:
    """Share of the items; 0 for all if the request has none."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        items = set(request.items)
        if not items:
            return [0.0] * len(candidates)
        return [sum(map(each.holds_item, items)) / len(items) for each in candidates]
