"""On which cores an engine computes now, from what it is about to do and what the others do. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from triptych_common.cores.plan import CorePolicy

DECODE_HOLD_NS = 20_000_000
"""An engine that decoded so short a time ago is about to decode again: its cores are not idle."""


class Work(IntEnum):
    """What an engine's worker computes. The numbers are those on the board."""

    IDLE = 0
    DECODE = 1  # a step of text: some tokens at most
    PREFILL = 2  # a step with a prompt, or a part of one, and nobody decodes
    ENCODE = 3
    CHUNK = 4  # a step with a part of a prompt, in which others decode


@dataclass(frozen=True)
class EngineLoad:
    """One engine's worker, as the board shows it."""

    work: Work
    cores: frozenset[int]  # that it owns
    since_ns: int  # CLOCK_MONOTONIC, one for all processes of a host
    before: Work = Work.IDLE  # what it did before it was idle


def cores_for(
    policy: CorePolicy,
    own: frozenset[int],
    host: frozenset[int],
    others: Iterable[EngineLoad],
    now_ns: int,
    *,
    is_late: bool = False,
) -> frozenset[int]:
    """Cores for the next step or layer: the engine's own, and all of `host` that nobody else keeps.

    Two that borrow the same idle core share it as the kernel sees fit. `is_late`: a prompt of the step should
    have been computed before; under `text_first` an encode keeps no core from it, and goes on beside it.
    """
    if policy == "split":
        return own
    kept: set[int] = set()
    for other in others:
        if _keeps_cores(other, policy, now_ns, is_late=is_late):
            kept |= other.cores
    return own | (host - kept)


def _keeps_cores(other: EngineLoad, policy: CorePolicy, now_ns: int, *, is_late: bool) -> bool:
    """Whether its cores cannot be borrowed now, by a step that is late or by another."""
    if other.work is Work.ENCODE:
        return not (is_late and policy == "text_first")
    if other.work in (Work.PREFILL, Work.CHUNK):
        return True
    if policy == "image_first":
        return False
    between_steps = other.before in (Work.DECODE, Work.CHUNK) and now_ns - other.since_ns < DECODE_HOLD_NS
    return other.work is Work.DECODE or between_steps
