"""Score by the request's items in the instance's store, so that none must come from another host."""

from collections.abc import Sequence

from triptych_gateway.routing.scheduling.candidates import Candidate, RoutingRequest


class MediaNearScorer:
    """Share of the items; 0 for all without items, or with one registered store."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        items = set(request.items)
        if not items or not request.items_at:
            return [0.0] * len(candidates)
        return [
            len(items & request.items_at.get(each.record.store or "", frozenset())) / len(items)
            for each in candidates
        ]
