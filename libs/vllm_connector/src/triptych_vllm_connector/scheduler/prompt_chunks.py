"""Prompt chunks: how many tokens of prompts a step computes while others decode. Pure.

    step   [ d ][ d |  chunk  ][ d |  chunk  ][ d ]      d: a token for each request that decodes
    gap    '---''-------------'

A step gives every request that decodes one token, and takes as long as all that is computed in it. So a long
prompt in a step is a gap in every stream. A chunk is chosen so that decoding keeps `decode_share` of the
time: with a half of it, a step with a chunk takes twice as long as one without. What a token of a prompt
costs, and what decoding costs, is measured with each step.

Chunks that share a step with decoding are those of Sarathi-Serve ("stall-free batching"); there their size
is set by hand.
"""

import statistics
from collections import deque
from collections.abc import Sequence

from triptych_common.cores.plan import CorePolicy

DECODE_SHARES: dict[CorePolicy, float] = {"split": 0.0, "text_first": 0.3, "image_first": 0.1}
"""By default."""
CHUNK_SIZES: tuple[int, ...] = tuple(sorted(size << power for size in (32, 48) for power in range(9)))
"""Tokens. Few different ones: kernels are chosen, and on the CPU made, for each shape."""
NUM_REMEMBERED = 16


class PromptChunks:
    """`decode_share`: of a step's time, for those that decode; 0: a step takes as much as vLLM lets it."""

    def __init__(self, decode_share: float) -> None:
        self._decode_share = decode_share
        self._decode_s: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._prompt_token_s: deque[float] = deque(maxlen=NUM_REMEMBERED)

    def note_step(self, num_prompt_tokens: int, num_decoding: int, seconds: float) -> None:
        """A step with so many tokens of prompts and so many requests that decode took `seconds`."""
        if num_prompt_tokens == 0:
            if num_decoding:
                self._decode_s.append(seconds)
        elif num_prompt_tokens >= CHUNK_SIZES[0]:
            decode_s = statistics.median(self._decode_s) if num_decoding and self._decode_s else 0.0
            self._prompt_token_s.append(max(seconds - decode_s, 0.0) / num_prompt_tokens)

    def max_prompt_tokens(self) -> int | None:
        """Of a step in which others decode. None: as many as vLLM lets it, also while costs are not known."""
        if not (self._decode_share and self._decode_s and self._prompt_token_s):
            return None
        decode_s = statistics.median(self._decode_s)
        prompt_s = decode_s * (1 - self._decode_share) / self._decode_share
        num_tokens = prompt_s / max(_upper_quartile(self._prompt_token_s), 1e-9)
        fitting = [size for size in CHUNK_SIZES if size <= num_tokens]
        return fitting[-1] if fitting else CHUNK_SIZES[0]


def _upper_quartile(values: Sequence[float]) -> float:
    """Rather too much than too little: cores that were borrowed may be gone in the next step."""
    return sorted(values)[len(values) * 3 // 4]
