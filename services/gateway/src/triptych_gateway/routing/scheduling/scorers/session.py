"""Score by the instance that a conversation belongs to, by its caller's name for it.

Rendezvous hashing gives all gateways the same instance, and when an instance comes or goes, only its own
conversations move.
"""

from collections.abc import Sequence

from blake3 import blake3

from triptych_gateway.routing.scheduling.candidates import Candidate, RoutingRequest


class SessionScorer:
    """Score 1 for the conversation's instance; 0 for all if the caller names no conversation."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        if not request.session:
            return [0.0] * len(candidates)
        draws = [_draw(request.session, each.record.instance) for each in candidates]
        owner = draws.index(max(draws))
        return [float(index == owner) for index in range(len(candidates))]


def _draw(session: str, instance: str) -> bytes:
    return blake3(f"{session}\0{instance}".encode()).digest()
