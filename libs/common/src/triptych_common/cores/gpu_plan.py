"""GPU of each engine of a host, and each engine's part of a shared GPU. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from triptych_common.cores.plan import CorePolicy

EngineKind = Literal["encoder", "prefill_decode"]
ENCODER: EngineKind = "encoder"
PREFILL_DECODE: EngineKind = "prefill_decode"

ENCODER_SHARE = 0.10
"""Share of a GPU that an encoder needs beside others; vLLM checks at its start that it is free."""
UNCOUNTED_SHARE = 0.15
"""Share of a shared GPU outside vLLM's count: CUDA contexts, tensors injected into prefill_decodes, and the
encoder's peaks beyond its share."""
SMALLEST_SHARE = 0.05
SLAB_SHARE = 0.02
"""Share of a GPU that the store's slab takes where an encoder and text share it."""
SMALLEST_SLAB_BYTES = 256 << 20
SLAB_STEP_BYTES = 2 << 20  # a page of the GPU's memory

NORMAL, BELOW_NORMAL = 0, 1
"""Values of CUDA_MPS_CLIENT_PRIORITY; there are no others."""


@dataclass(frozen=True)
class MpsLimits:
    """MPS limits of one engine on a shared GPU. None: the control daemon's default."""

    thread_percentage: int | None = None  # upper bound of the GPU's threads; none are reserved
    priority: int | None = None  # NORMAL or BELOW_NORMAL: a hint to CUDA, and no promise

    def environment(self) -> dict[str, str]:
        """Return the variables of the engine's process, which CUDA reads once at first use."""
        limits = {
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": self.thread_percentage,
            "CUDA_MPS_CLIENT_PRIORITY": self.priority,
        }
        return {name: str(value) for name, value in limits.items() if value is not None}


@dataclass(frozen=True)
class GpuPlace:
    gpus: tuple[str, ...]  # as in CUDA_VISIBLE_DEVICES: numbers, or UUIDs, also of parts of a GPU (MIG)
    num_engines: int  # on the fullest of these GPUs, this one among them
    memory_share: float | None  # as `--gpu-memory-utilization` takes it; None: vLLM's default
    limits: MpsLimits


def plan_gpus(
    num_encoders: int,
    num_prefill_decodes: int,
    gpus: Sequence[str],
    policy: CorePolicy,
    slab_share: float = 0.0,
    *,
    encoder_width: int = 1,
    prefill_decode_width: int = 1,
) -> list[GpuPlace]:
    """Return a place for each engine, encoders first.

    Args:
        slab_share: part of the first GPU that is the store's.
        encoder_width: GPUs over which each encoder is spread, its `--tensor-parallel-size`.
        prefill_decode_width: the same of each prefill_decode.
    """
    kinds = [ENCODER] * num_encoders + [PREFILL_DECODE] * num_prefill_decodes
    placed = place_engines(
        num_encoders,
        num_prefill_decodes,
        len(gpus),
        encoder_width=encoder_width,
        prefill_decode_width=prefill_decode_width,
    )
    parts: list[list[_Part]] = [[] for _ in kinds]  # by the engine's position, one for each of its GPUs
    for number in range(len(gpus)):
        here = [position for position, numbers in enumerate(placed) if number in numbers]
        kinds_here = [kinds[position] for position in here]
        slab_here = slab_share if number == 0 else 0.0
        is_divided = len(here) > 1 or slab_here > 0
        shares = memory_shares(kinds_here, slab_here)
        limits = mps_limits(policy, kinds_here)
        for position, share, limit in zip(here, shares, limits, strict=True):
            parts[position].append(_Part(len(here), share if is_divided else None, limit))
    return [
        _place(tuple(gpus[number] for number in numbers), own)
        for numbers, own in zip(placed, parts, strict=True)
    ]


@dataclass(frozen=True)
class _Part:
    num_engines: int
    memory_share: float | None
    limits: MpsLimits


def _place(gpus: tuple[str, ...], parts: Sequence[_Part]) -> GpuPlace:
    """Return the place of an engine that takes the same share of each of its GPUs: the smallest it may."""
    fullest = max(parts, key=lambda part: part.num_engines)
    shares = [part.memory_share for part in parts if part.memory_share is not None]
    return GpuPlace(gpus, fullest.num_engines, min(shares, default=None), fullest.limits)


def place_engines(
    num_encoders: int,
    num_prefill_decodes: int,
    num_gpus: int,
    *,
    encoder_width: int = 1,
    prefill_decode_width: int = 1,
) -> list[tuple[int, ...]]:
    """Return the numbers of each engine's GPUs, ascending; encoders first.

    Encoders share with each other before they share with text: where each prefill_decode can have GPUs of
    its own and enough are left for an encoder, encoders take what is left. Else all take turns. An engine
    that is to have more GPUs than there are gets all.
    """
    encoder_width, text_width = min(encoder_width, num_gpus), min(prefill_decode_width, num_gpus)
    num_left = num_gpus - num_prefill_decodes * text_width
    num_groups = min(num_encoders, num_left // encoder_width)  # of GPUs that encoders have for themselves
    if num_encoders and num_groups < 1:
        widths = [encoder_width] * num_encoders + [text_width] * num_prefill_decodes
        starts = [sum(widths[:position]) for position in range(len(widths))]
        return [_in_a_row(start, width, num_gpus) for start, width in zip(starts, widths, strict=True)]
    encoders = [
        _in_a_row(number % num_groups * encoder_width, encoder_width, num_gpus)
        for number in range(num_encoders)
    ]
    first = max(num_groups, 0) * encoder_width
    return encoders + [
        _in_a_row(first + number * text_width, text_width, num_gpus) for number in range(num_prefill_decodes)
    ]


def _in_a_row(start: int, width: int, num_gpus: int) -> tuple[int, ...]:
    return tuple(sorted((start + offset) % num_gpus for offset in range(width)))


def default_slab_bytes(gpu_bytes: int) -> int:
    """Return the size of the store's slab on a GPU that an encoder shares with text."""
    wanted = max(SMALLEST_SLAB_BYTES, int(SLAB_SHARE * gpu_bytes))
    return wanted // SLAB_STEP_BYTES * SLAB_STEP_BYTES


def memory_shares(kinds: Sequence[EngineKind], slab_share: float) -> list[float]:
    """Return each engine's part of one GPU, for `--gpu-memory-utilization`.

    Encoders get what they need; the prefill_decodes' KV caches get the rest, in equal parts.
    """
    num_encoders = kinds.count(ENCODER)
    num_others = len(kinds) - num_encoders
    left = 1.0 - UNCOUNTED_SHARE - slab_share - num_encoders * ENCODER_SHARE
    other = max(SMALLEST_SHARE, math.floor(100 * left / max(num_others, 1) + 1e-6) / 100)
    return [ENCODER_SHARE if kind == ENCODER else other for kind in kinds]


def mps_limits(policy: CorePolicy, kinds: Sequence[EngineKind]) -> list[MpsLimits]:
    """Return the MPS limits of each engine of one GPU.

    `split` gives equal parts. The other two leave the whole GPU to each engine, so that one may use what
    others leave idle, and put one kind behind the other while both have work.
    """
    if len(kinds) < 2:
        return [MpsLimits()] * len(kinds)
    if policy == "split":
        return [MpsLimits(thread_percentage=100 // len(kinds))] * len(kinds)
    if len(set(kinds)) == 1:
        return [MpsLimits()] * len(kinds)
    behind = ENCODER if policy == "text_first" else PREFILL_DECODE
    return [MpsLimits(priority=BELOW_NORMAL if kind == behind else NORMAL) for kind in kinds]
