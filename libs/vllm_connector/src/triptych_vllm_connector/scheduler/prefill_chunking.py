"""Prompt chunks: how many tokens of prompts a step computes while others decode. Pure.

    step   [ d ][ d |  chunk  ][ d |  chunk  ][ d ]      d: a token for each request that decodes
    gap    '---''-------------'

A step gives every request that decodes one token, and takes as long as all that is computed in it. So a long
prompt in a step is a gap in every stream. A chunk is chosen so that decoding keeps `decode_share` of the
time: with a half of it, a step with a chunk takes twice as long as one without.

What steps cost is measured. Decoding by the number of requests that decode, in powers of two: where no step
without a prompt was seen for long, one is asked for. A step with a prompt costs, beyond decoding, something
for itself and something for each token; both come from the differences between such steps (the median of all
pairs' slopes, after Theil and Sen). Where a step costs much for itself, small chunks gain nothing: a chunk's
tokens then take at least as long as that.

While nothing decodes, a step of several flows' prompts is bounded too (`max_turn_tokens`): whose turn is next
waits for the step that is being computed. Steps with a late prompt (`PrefillFairness.is_late`) may have more
cores: what their tokens cost is kept apart.

Chunks that share a step with decoding are those of Sarathi-Serve ("stall-free batching"); there their size
is set by hand.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import combinations
from statistics import median

from triptych_common.cores.plan import CorePolicy

DECODE_SHARES: dict[CorePolicy, float] = {"split": 0.0, "text_first": 0.3, "image_first": 0.1}
"""Default `decode_share` of each core policy."""
CHUNK_SIZES: tuple[int, ...] = tuple(sorted(size << power for size in (32, 48) for power in range(9)))
"""Sizes in tokens; few, because kernels are chosen (and on CPUs compiled) for each shape."""
TURN_S = 0.05
"""Seconds of prompts in a step while flows take turns, which bounds the wait of a new request."""
LATE_TURN_S = 0.15
"""Seconds of prompts in a step with a late prompt; new requests come after it."""
FIRST_CHUNK = 64
"""Tokens of a chunk until the cost of tokens is known."""
NUM_REMEMBERED = 16
MAX_AGE_STEPS = 256
"""Steps after which the cost of decoding is measured again, because contexts grow."""
MAX_LOOKS = 2
"""Maximum number of successive steps without a prompt that measure the cost of decoding."""


class PrefillChunking:
    """Limits a step's prompt tokens so that decoding keeps `decode_share` of the time; 0 is unlimited."""

    def __init__(self, decode_share: float) -> None:
        self._decode_share = decode_share
        self._decode_s: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_REMEMBERED))
        self._seen_at: dict[int, int] = {}  # number of the last step without a prompt, by batch size
        self._prompt_steps: dict[bool, deque[tuple[int, int, float]]] = {
            is_late: deque(maxlen=NUM_REMEMBERED) for is_late in (False, True)
        }
        self._num_steps = 0
        self._num_looks = 0

    @property
    def is_on(self) -> bool:
        """True if steps are limited at all."""
        return self._decode_share > 0

    def note_step(
        self, num_prompt_tokens: int, num_decoding: int, seconds: float, *, is_late: bool = False
    ) -> None:
        """Record the seconds of a step with these numbers of prompt tokens and decoding requests."""
        self._num_steps += 1
        if num_prompt_tokens >= CHUNK_SIZES[0]:
            self._prompt_steps[is_late].append((num_prompt_tokens, num_decoding, seconds))
        elif num_prompt_tokens == 0 and num_decoding:
            size = num_decoding.bit_length()
            self._decode_s[size].append(seconds)
            self._seen_at[size] = self._num_steps
            self._num_looks = 0

    def max_prompt_tokens(self, num_decoding: int, *, is_late: bool = False) -> int | None:
        """Maximum prompt tokens of a step in which `num_decoding` requests decode; None is vLLM's own limit.

        0 keeps prompts out of this step, to measure the cost of decoding.
        """
        if not (self.is_on and num_decoding):
            return None
        if self._is_unknown(num_decoding.bit_length()) and self._num_looks < MAX_LOOKS:
            self._num_looks += 1
            return 0
        decode_s = self._decoding_s(num_decoding)
        steps = self._steps_like(is_late)
        if not steps or not decode_s:
            return FIRST_CHUNK
        return self._largest_within(decode_s * (1 - self._decode_share) / self._decode_share, steps)

    def max_turn_tokens(self, *, is_late: bool = False) -> int | None:
        """Maximum prompt tokens of a step while several flows have requests and none decodes; None is vLLM's
        own."""
        steps = self._steps_like(is_late)
        if not (self.is_on and steps):
            return None
        return self._largest_within(LATE_TURN_S if is_late else TURN_S, steps)

    def _steps_like(self, is_late: bool) -> Sequence[tuple[int, int, float]]:
        """Latest steps with prompts of this kind; of the other kind if there are none."""
        steps = self._prompt_steps[is_late]
        return steps or self._prompt_steps[not is_late]

    def _largest_within(self, most_s: float, steps: Sequence[tuple[int, int, float]]) -> int:
        """Largest chunk within `most_s`, or within the fixed cost of a step if that is longer."""
        step_s, token_s = self._prompt_costs(steps)
        num_tokens = max(most_s - step_s, step_s) / max(token_s, 1e-9)
        fitting = [size for size in CHUNK_SIZES if size <= num_tokens]
        return fitting[-1] if fitting else CHUNK_SIZES[0]

    def _is_unknown(self, size: int) -> bool:
        seen_at = self._seen_at.get(size)
        return seen_at is None or self._num_steps - seen_at > MAX_AGE_STEPS

    def _decoding_s(self, num_decoding: int) -> float:
        """Seconds of a step without a prompt for the nearest measured number of requests; 0 if none is."""
        if not self._decode_s:
            return 0.0
        size = num_decoding.bit_length()
        return median(self._decode_s[min(self._decode_s, key=lambda seen: abs(seen - size))])

    def _prompt_costs(self, prompt_steps: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
        """Seconds that a prompt adds to a step: fixed, and for each token."""
        sizes = {decoding for _, decoding, _ in prompt_steps}
        decoding_s = {decoding: self._decoding_s(max(decoding, 1)) for decoding in sizes}
        steps = [
            (tokens, max(seconds - decoding_s[decoding], 0.0)) for tokens, decoding, seconds in prompt_steps
        ]
        slopes = [
            (t - s) / (m - n) for (n, s), (m, t) in combinations(steps, 2) if abs(m - n) >= CHUNK_SIZES[0]
        ]
        if len(slopes) >= NUM_REMEMBERED and median(slopes) > 0:
            token_s = median(slopes)
            return max(median(seconds - token_s * tokens for tokens, seconds in steps), 0.0), token_s
        return 0.0, _upper_quartile([seconds / tokens for tokens, seconds in steps])


def _upper_quartile(values: Sequence[float]) -> float:
    """Upper quartile, a pessimistic estimate: cores borrowed now may be gone in the next step."""
    return sorted(values)[len(values) * 3 // 4]
