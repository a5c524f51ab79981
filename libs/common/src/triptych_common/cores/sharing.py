"""Choice of cores for an engine's next step, from its work and the other engines'. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from triptych_common.cores.plan import CorePolicy

DECODE_HOLD_NS = 20_000_000
"""Nanoseconds after a decode for which an engine's cores do not count as idle."""


class Work(IntEnum):
    """Kinds of work of an engine's worker; the numbers are those on the board."""

    IDLE = 0
    DECODE = 1  # a step of text: some tokens at most
    PREFILL = 2  # a step with a prompt, or a part of one, and no decode
    ENCODE = 3
    CHUNK = 4  # a step with a part of a prompt, in which others decode


@dataclass(frozen=True)
class EngineLoad:
    """One engine's worker, as the board shows it."""

    work: Work
    cores: frozenset[int]  # cores that it owns
    since_ns: int  # CLOCK_MONOTONIC, one for all processes of a host
    before: Work = Work.IDLE  # work before it was idle


def cores_for(
    policy: CorePolicy,
    own: frozenset[int],
    host: frozenset[int],
    others: Iterable[EngineLoad],
    now_ns: int,
    *,
    is_late: bool = False,
) -> frozenset[int]:
    """Return the cores for the next step or layer: the engine's own, and those of `host` that no other keeps.

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
    """Return whether `other` keeps its cores from being borrowed now, by a late step or another one."""
    if other.work is Work.ENCODE:
        return not (is_late and policy == "text_first")
    if other.work in (Work.PREFILL, Work.CHUNK):
        return True
    if policy == "image_first":
        return False
    between_steps = other.before in (Work.DECODE, Work.CHUNK) and now_ns - other.since_ns < DECODE_HOLD_NS
    return other.work is Work.DECODE or between_steps
