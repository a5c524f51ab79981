"""Score by the number of requests an instance works on at once, for larger machines in a mixed fleet."""

from collections.abc import Sequence

from triptych_gateway.routing.scheduling.candidates import Candidate, RoutingRequest


class HardwareScorer:
    """Share of the largest; GPUs' multiprocessors count if every candidate announces them."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        sizes = [_num_multiprocessors(each) for each in candidates]
        if not all(sizes):
            sizes = [each.record.num_slots for each in candidates]
        largest = max(sizes)
        return [size / largest if largest else 1.0 for size in sizes]


def _num_multiprocessors(candidate: Candidate) -> int:
    compute = candidate.record.compute
    return 0 if compute is None else compute.num_multiprocessors or 0
