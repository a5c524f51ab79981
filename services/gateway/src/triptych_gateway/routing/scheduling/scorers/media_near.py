"""The request's items that the instance's store has, so that none must come from another host."""

from collections.abc import Sequence

from triptych_gateway.routing.scheduling.candidates import Candidate, RoutingRequest


class MediaNearScorer:
    """The share of them; 0 for all where the request has none, or one store is registered."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        items = set(request.items)
        if not items or not request.items_at:
            return [0.0] * len(candidates)
        return [
            len(items & request.items_at.get(each.record.store or "", frozenset())) / len(items)
            for each in candidates
        ]
