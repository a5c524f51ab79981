"""The instance that a conversation belongs to, by what its caller calls it.

By rendezvous hashing: all gateways find the same one, and when an instance comes or goes, only the
conversations that are or were its own move.
"""

from collections.abc import Sequence

from blake3 import blake3

from triptych_gateway.routing.scheduling.candidates import Candidate, RoutingRequest


class SessionScorer:
    """1 for one of them; 0 for all, where the caller has named no conversation."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        if not request.session:
            return [0.0] * len(candidates)
        draws = [_draw(request.session, each.record.instance) for each in candidates]
        owner = draws.index(max(draws))
        return [float(index == owner) for index in range(len(candidates))]


def _draw(session: str, instance: str) -> bytes:
    return blake3(f"{session}\0{instance}".encode()).digest()
