"""ServingCosts: costs of encode and prefill in one namespace, as this gateway has measured them. Pure.

Least squares of relative errors, with weights that fade: an observation counts `FADE` ** (number of later
ones), so the memory is five numbers, and a machine that has become slower is noticed within some twenty
observations. Relative, since what takes long also varies by more: a tenth of sixteen images is more than one.

    encode        an encoder's seconds for one item, over its rows. Where several are under way at one
                  encoder, each counts from the end of the one before: the sum is the encoder's time
    after_encode  from the last encode that was predicted to the first token, over all rows of the request:
                  prefill as far as it was not done meanwhile, and every delay on the way
    local         an instance's seconds to the first token of a request that it encodes itself, over all rows
    prefill       an instance's seconds to the first token, over the tokens of a text
    encode_alone  as `encode`, of items beside which encoders had no other
    handover      seconds of such an item from its order to its completion without its encode, over its rows

Observed while nothing else was in the way, so that waiting is not taken for work. First tokens are seen of
streams alone: without any stream, `encode` is all that is known, and the rest cancels out.
"""

import math
from dataclasses import dataclass

from cachetools import LRUCache

FADE = 0.95
MIN_OBSERVATIONS = 3  # fewer are no estimate
MAX_AGE_S = 600.0  # without an observation, after which the estimate is forgotten
MAX_SECONDS = 3600.0  # of one observation; also bounds what a peer may report
SMALLEST_AMOUNT = 1e-6  # smaller amounts count as none
LEAST_AMOUNT = 1.0  # smaller ones count no more than this
OUTLIER = 5.0  # times the estimate; larger observations count as that
MIN_SPREAD = 0.05  # of the amounts, relative: with less of it, the line goes through the origin


@dataclass(frozen=True, slots=True)
class Line:
    """Line of `base_s` seconds and `per_unit_s` for each unit. Neither is negative."""

    base_s: float
    per_unit_s: float

    def seconds(self, amount: float) -> float:
        return self.base_s + self.per_unit_s * amount


class LinearCost:
    """Estimator of a line; `now` is in monotonic seconds."""

    def __init__(self, max_age_s: float = MAX_AGE_S) -> None:
        self._max_age_s = max_age_s
        self._reset()

    def _reset(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._num = 0
        self._seen_at = float("-inf")

    def observe(self, amount: float, seconds: float, now: float) -> None:
        """Record one observation. Infinite, undefined and negative ones are ignored."""
        if not (math.isfinite(amount) and math.isfinite(seconds)) or amount < 0 or seconds < 0:
            return
        if now - self._seen_at > self._max_age_s:
            self._reset()
        seconds = min(seconds, MAX_SECONDS)
        estimate = self.line(now)
        if estimate is not None and (usual := estimate.seconds(amount)) > 0:
            seconds = min(seconds, OUTLIER * usual)
        weight = max(amount, LEAST_AMOUNT) ** -2
        self._weight = FADE * self._weight + weight
        self._x = FADE * self._x + weight * amount
        self._y = FADE * self._y + weight * seconds
        self._xx = FADE * self._xx + weight * amount * amount
        self._xy = FADE * self._xy + weight * amount * seconds
        self._num += 1
        self._seen_at = now

    def line(self, now: float) -> Line | None:
        """Return the estimate; None with too few observations, or none for a long time."""
        if self._num < MIN_OBSERVATIONS or now - self._seen_at > self._max_age_s:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        if mean_x < SMALLEST_AMOUNT:
            return Line(mean_y, 0.0)
        variance = self._xx / self._weight - mean_x * mean_x
        if variance <= (MIN_SPREAD * mean_x) ** 2:
            return Line(0.0, mean_y / mean_x)
        slope = (self._xy / self._weight - mean_x * mean_y) / variance
        if slope <= 0:
            return Line(mean_y, 0.0)
        base_s = mean_y - slope * mean_x
        if base_s < 0:
            return Line(0.0, self._xy / self._xx)
        return Line(base_s, slope)


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
    encode_alone: Line | None = None
    handover: Line | None = None


class ServingCosts:
    """Measured costs of one namespace; `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._encode, self._after_encode = LinearCost(), LinearCost()
        self._local, self._prefill = LinearCost(INSTANCE_MAX_AGE_S), LinearCost(INSTANCE_MAX_AGE_S)
        self._encode_alone, self._handover = LinearCost(INSTANCE_MAX_AGE_S), LinearCost(INSTANCE_MAX_AGE_S)
        self._ended_at: LRUCache[str, float] = LRUCache(MAX_ENCODERS)
        self._rows: LRUCache[int, float] = LRUCache(MAX_IMAGE_SIZES)
        self._mean_rows = 0.0

    def costs(self, now: float) -> Costs:
        return Costs(
            self._encode.line(now),
            self._after_encode.line(now),
            self._local.line(now),
            self._prefill.line(now),
            self._encode_alone.line(now),
            self._handover.line(now),
        )

    def on_completed(
        self, encoder: str, num_rows: int, encode_s: float, now: float, alone_since: float | None = None
    ) -> None:
        """Record that `encoder` made an item of `num_rows` in `encode_s`.

        `alone_since`: when it was ordered, if no other is in flight now.
        """
        if not math.isfinite(encode_s):
            return
        if alone_since is not None and alone_since >= max(self._ended_at.values(), default=alone_since):
            self._encode_alone.observe(num_rows, encode_s, now)
            self._handover.observe(num_rows, max(now - alone_since - encode_s, 0.0), now)
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
        self._prefill.observe(num_tokens, seconds, now)

    # ---- rows ------------------------------------------------------------------------------------
    def on_sizes(self, num_pixels: int, num_rows: int) -> None:
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

    @property
    def mean_rows(self) -> float:
        """Mean rows of an item whose image is unknown."""
        return self._mean_rows


def _size_class(num_pixels: int) -> int:
    return round(2 * math.log2(max(num_pixels, 1)))
