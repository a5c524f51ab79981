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
    """GPU and limits of one engine."""

    gpu: str  # as in CUDA_VISIBLE_DEVICES: a number, or a UUID, also of a part of a GPU (MIG)
    num_engines: int  # on this GPU, this one among them
    memory_share: float | None  # as `--gpu-memory-utilization` takes it; None: vLLM's default
    limits: MpsLimits


def plan_gpus(
    num_encoders: int,
    num_prefill_decodes: int,
    gpus: Sequence[str],
    policy: CorePolicy,
    slab_share: float = 0.0,
) -> list[GpuPlace]:
    """Return a place for each engine, encoders first; `slab_share` of the first GPU is the store's."""
    kinds = [ENCODER] * num_encoders + [PREFILL_DECODE] * num_prefill_decodes
    numbers = place_engines(num_encoders, num_prefill_decodes, len(gpus))
    places: dict[int, GpuPlace] = {}  # by the engine's position
    for number, gpu in enumerate(gpus):
        here = [position for position, at in enumerate(numbers) if at == number]
        kinds_here = [kinds[position] for position in here]
        slab_here = slab_share if number == 0 else 0.0
        is_divided = len(here) > 1 or slab_here > 0
        shares = memory_shares(kinds_here, slab_here)
        limits = mps_limits(policy, kinds_here)
        for position, share, limit in zip(here, shares, limits, strict=True):
            places[position] = GpuPlace(gpu, len(here), share if is_divided else None, limit)
    return [places[position] for position in range(len(kinds))]


def place_engines(num_encoders: int, num_prefill_decodes: int, num_gpus: int) -> list[int]:
    """Return the number of each engine's GPU, encoders first.

    Encoders share with each other before they share with text: where each prefill_decode can have a GPU of
    its own and one is left, encoders take what is left. Else all take turns.
    """
    for_encoders = min(num_encoders, num_gpus - num_prefill_decodes)
    if num_encoders and for_encoders < 1:
        return [position % num_gpus for position in range(num_encoders + num_prefill_decodes)]
    encoders = [number % for_encoders for number in range(num_encoders)]
    first = max(for_encoders, 0)
    return encoders + [(first + number) % num_gpus for number in range(num_prefill_decodes)]


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
