"""ServingCosts: costs of encode and prefill in one namespace, as this gateway has measured them. Pure.

    encode        an encoder's seconds for one item, over its rows. Where several are under way at one
                  encoder, each counts from the end of the one before: the sum is the encoder's time
    after_encode  from the last encode that was predicted to the first token, over all rows of the request:
                  prefill as far as it was not done meanwhile, and every delay on the way
    local         an instance's seconds to the first token of a request that it encodes itself, over all rows
    prefill       an instance's seconds to the first token, over the tokens of a text

Observed while nothing else was in the way, so that waiting is not taken for work. First tokens are seen of
streams alone: without any stream, `encode` is all that is known, and the rest cancels out.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cachetools import LRUCache

from triptych_gateway.decision.linear_cost import Line, LinearCost

MAX_ENCODERS = 256  # whose last end is remembered
MAX_IMAGE_SIZES = 128  # classes of image sizes, half an octave each
ROWS_FADE = 0.7
INSTANCE_MAX_AGE_S = 3600.0  # of what an instance takes: while it does not help, nothing is observed


@dataclass(frozen=True, slots=True)
class Costs:
    """Estimates at one moment; None is not known."""

    encode: Line | None = None
    after_encode: Line | None = None
    local: Line | None = None
    prefill: Line | None = None


class ServingCosts:
    """Measured costs of one namespace; `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._encode, self._after_encode = LinearCost(), LinearCost()
        self._local, self._prefill = LinearCost(INSTANCE_MAX_AGE_S), LinearCost(INSTANCE_MAX_AGE_S)
        self._ended_at: LRUCache[str, float] = LRUCache(MAX_ENCODERS)
        self._rows: LRUCache[int, float] = LRUCache(MAX_IMAGE_SIZES)
        self._mean_rows = 0.0

    def costs(self, now: float) -> Costs:
        return Costs(
            self._encode.line(now),
            self._after_encode.line(now),
            self._local.line(now),
            self._prefill.line(now),
        )

    def on_completed(self, encoder: str, num_rows: int, encode_s: float, now: float) -> None:
        """Record that `encoder` made an item of `num_rows` in `encode_s`."""
        if not math.isfinite(encode_s):
            return
        began_at = max(now - max(encode_s, 0.0), self._ended_at.get(encoder, float("-inf")))
        self._ended_at[encoder] = now
        self._encode.observe(num_rows, now - began_at, now)

    def on_answer(self, num_rows: float, after_encode_s: float, now: float) -> None:
        """Record an answer to a request that encoders served, with no other's work before it."""
        self._after_encode.observe(num_rows, max(after_encode_s, 0.0), now)

    def on_local_answer(self, num_rows: float, seconds: float, now: float) -> None:
        """Record a request that an idle instance encoded itself; `seconds` without those of its text."""
        self._local.observe(num_rows, max(seconds, 0.0), now)

    def on_text_answer(self, num_tokens: float, seconds: float, now: float) -> None:
        """Record a text that an idle instance has answered."""
        self._prefill.observe(num_tokens, seconds, now)

    # ---- rows ------------------------------------------------------------------------------------
    def on_sizes(self, num_pixels: int, num_rows: int) -> None:
        """Record the rows of an image."""
        known = self._rows.get(_size_class(num_pixels))
        rows = num_rows if known is None else ROWS_FADE * known + (1 - ROWS_FADE) * num_rows
        self._rows[_size_class(num_pixels)] = rows
        self._mean_rows = rows if not self._mean_rows else 0.9 * self._mean_rows + 0.1 * num_rows

    def rows_of(self, num_pixels: int) -> float:
        """Return an image's estimated rows, scaled from the nearest size that was seen; 0 without any."""
        wanted = _size_class(num_pixels)
        if not self._rows:
            return 0.0
        nearest = min(self._rows, key=lambda size: abs(size - wanted))
        return float(self._rows[nearest] * 2.0 ** ((wanted - nearest) / 2))

    def rows_of_all(self, pixels: Iterable[int]) -> float:
        return sum(map(self.rows_of, pixels))

    @property
    def mean_rows(self) -> float:
        """Mean rows of an item whose image is unknown."""
        return self._mean_rows


def _size_class(num_pixels: int) -> int:
    return round(2 * math.log2(max(num_pixels, 1)))
