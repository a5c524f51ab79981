"""Score by little text in this gateway's requests at an instance: long prompts are more work."""

from collections.abc import Sequence

from triptych_gateway.routing.scheduling.candidates import Candidate, RoutingRequest

NUM_BYTES = 65_536  # excess over the least busy candidate at which the score is 0; 16,000 tokens


class TokensScorer:
    """Score 1 for the candidate with the least text; less per byte beyond it."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        least = min(each.num_prompt_bytes for each in candidates)
        return [max(0.0, 1 - (each.num_prompt_bytes - least) / NUM_BYTES) for each in candidates]
