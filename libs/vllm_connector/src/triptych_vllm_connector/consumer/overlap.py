"""Overlap: how far a request may run before all of its items are here. Pure.

Space is granted for the request as a whole first; only its use is piecemeal. Of the places that the KV cache
does not cover yet:

    here          here          missing       here
    text [item 0] text [item 1] text [item 2] text [item 3] text
         ^ computed                  ^ horizon

The tokens between `computed` and `horizon`, the start of the first place whose item is not here, can be
computed now. vLLM's scheduler clips the step there by itself, since its encoder cache refuses the item.

Few tokens are no reason for a step of their own: a step costs about as much for ten tokens as for one, an
item that comes meanwhile waits for its end, and what prepares the item wants the core. So the request waits
until there are `min_tokens`, or until all that it was granted is here. Items that come while a step runs are
taken together by the next one.

As proposed for disaggregated serving of multimodal models by RServe ("overlapping encoding and prefill").
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto


class Readiness(Enum):
    """Extent to which a request may run in the next step."""

    WAITS = auto()  # not at all
    PART = auto()  # up to the first missing item
    WHOLE = auto()  # all that it was granted is here


@dataclass(frozen=True)
class PromptPlace:
    """One placeholder, from token `start` to `end` (exclusive)."""

    start: int
    end: int
    is_granted: bool  # it has space in the encoder cache
    is_here: bool  # a step may read its item, or encode it


@dataclass(frozen=True)
class OverlapPolicy:
    """`min_tokens` that justify a step, and `lookahead_tokens` that drafters read beyond a step's end."""

    is_on: bool = True
    min_tokens: int = 64
    lookahead_tokens: int = 0

    def readiness(
        self,
        places: Iterable[PromptPlace],
        num_computed_tokens: int,
        *,
        begins_whole: bool = False,
        goes_on: bool = False,
    ) -> Readiness:
        """`places` in prompt order, covered ones included; `num_computed_tokens` are in the KV cache.

        Args:
            begins_whole: this request does not run before all that it was granted is here.
            goes_on: it runs towards its first missing item, and its last step ended before that.
        """
        places = tuple(places)
        needed = [place for place in places if place.end > num_computed_tokens]
        if needed and not needed[0].is_granted:
            return Readiness.WAITS
        if all(place.is_here for place in needed if place.is_granted):
            return Readiness.WHOLE
        if not self.is_on or begins_whole:
            return Readiness.WAITS
        first_missing = next(place for place in needed if not (place.is_granted and place.is_here))
        num_computable = first_missing.start - self.lookahead_tokens - num_computed_tokens
        min_tokens = 1 if goes_on else self.min_tokens
        return Readiness.PART if num_computable >= min_tokens else Readiness.WAITS


NO_OVERLAP = OverlapPolicy(is_on=False)
