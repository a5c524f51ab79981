"""Division of a host's cores among its engines before any of them runs. Pure."""

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Literal, get_args

CorePolicy = Literal["split", "text_first", "image_first"]
"""Policy by which the engines of one host share its cores.

split: each has threads for its own, wherever they run. text_first: while images are encoded and prompts
computed, an engine also takes cores that others leave idle, and none from text that is being decoded.
image_first: it takes those as well.
"""

CORE_POLICIES: tuple[str, ...] = get_args(CorePolicy)
CORES_PER_SPARE_CORE = 8
"""One of this many cores is left to the gateway, Redis, the store and the engines' hosts."""
TEAM_FACTOR = 2
"""Threads for encoding and prompts per core that an engine owns, at most; they share those cores until others
are idle."""


def plan_cores(num_encoders: int, num_prefill_decodes: int, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the cores of each engine, encoders first: at least one each, shared if there are too few.

    Equal parts: while cores can be borrowed an idle engine's part is not lost, and while all are busy neither
    encoding nor decoding may starve. Spare cores go to prefill_decodes first, since decoding does not borrow.
    """
    num_engines = num_encoders + num_prefill_decodes
    if num_engines == 0 or not cores:
        return [()] * num_engines
    if num_engines >= len(cores):
        return [(cores[number % len(cores)],) for number in range(num_engines)]
    spare = min(len(cores) // CORES_PER_SPARE_CORE, len(cores) - num_engines)
    part, left = divmod(len(cores) - spare, num_engines)
    for_prefill_decodes = min(left, num_prefill_decodes)
    for_encoders = left - for_prefill_decodes
    shares = [
        *(part + (number < for_encoders) for number in range(num_encoders)),
        *(part + (number < for_prefill_decodes) for number in range(num_prefill_decodes)),
    ]
    ends = list(accumulate(shares))
    return [tuple(cores[end - share : end]) for share, end in zip(shares, ends, strict=True)]


def shared_cores(own: Collection[int], cores: Sequence[int]) -> frozenset[int]:
    """Return where an engine that owns `own` may compute: there, and on all `cores` but the spare ones.

    The spare ones are the last, which `plan_cores` leaves to no engine.
    """
    return frozenset(own) | frozenset(cores[: len(cores) - len(cores) // CORES_PER_SPARE_CORE])


def team_size(num_own: int, num_cores: int) -> int:
    """Return the number of threads for encoding and prompts of an engine with `num_own` of `num_cores`."""
    return max(num_own, min(TEAM_FACTOR * num_own, num_cores))
