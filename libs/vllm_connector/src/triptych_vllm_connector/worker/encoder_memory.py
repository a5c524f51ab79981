"""Trial encode at an encoder's start: its largest steps must fit the GPU's memory.

vLLM profiles the memory of engines that have a KV cache, and an encoder has none. What the trial takes stays
with torch's allocator, so an engine that starts later on the same GPU measures what is left beside it.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.utils.torch_utils import PIN_MEMORY

from triptych_common.domain.errors import TriptychError
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

GIB = 1 << 30


class EncoderMemoryError(TriptychError):
    """The encoder's largest step does not fit the GPU's memory; the text says what to change."""


@dataclass(frozen=True)
class LargestStep:
    """The largest items of one modality that one step encodes together."""

    modality: str
    num_items: int
    rows_per_item: int
    encode: Callable[[], object]


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of the GPU, and of them what is free and what this process's torch holds."""

    num_bytes: int
    num_free: int
    num_held: int


@torch.inference_mode()
def try_largest_steps(worker: Any) -> None:
    """Encode the largest step of each modality; `worker` is vLLM's, with its model loaded.

    Raises:
        EncoderMemoryError: one of them does not fit.
    """
    share = worker.vllm_config.cache_config.gpu_memory_utilization
    try_steps(largest_steps(worker), lambda: _memory(worker.device), share)


def try_steps(steps: Iterator[LargestStep], memory: Callable[[], GpuMemory], share: float) -> None:
    """Encode `steps`, and warn if torch then holds more than the engine's `share` of the GPU.

    Raises:
        EncoderMemoryError: one of them does not fit.
    """
    for step in steps:
        before = memory()
        try:
            step.encode()
        except torch.OutOfMemoryError as error:
            raise EncoderMemoryError(
                f"the encoder's largest step does not fit the GPU's memory: {step.num_items} {step.modality} "
                f"item(s) of {step.rows_per_item} rows each, with {before.num_free / GIB:.1f} of "
                f"{before.num_bytes / GIB:.1f} GiB free. Bound the items (--mm-processor-kwargs, "
                "--media-io-kwargs), lower --max-num-batched-tokens, or leave the encoder more of the GPU: "
                "lower --gpu-memory-utilization of the other engines on it"
            ) from error
    after = memory()
    gib = {"held_gib": round(after.num_held / GIB, 2), "share_gib": round(share * after.num_bytes / GIB, 2)}
    if after.num_held > share * after.num_bytes:
        log.warning("the encoder takes more than its share of the GPU", **gib)
    else:
        log.info("the encoder's largest steps fit", **gib)


def largest_steps(worker: Any) -> Iterator[LargestStep]:
    """Yield the largest step of each modality: images go together, other items alone, as in `containment`."""
    runner = worker.model_runner
    if not runner.supports_mm_inputs:
        return
    budget = MultiModalBudget(worker.vllm_config, MULTIMODAL_REGISTRY, enable_cache=False)
    model = runner.get_model()
    for modality, num_rows in budget.mm_max_toks_per_item.items():
        num_items = budget.mm_max_items_per_batch[modality] if modality == "image" else 1
        items = budget.get_dummy_encoder_profile_inputs(modality, num_items)
        if not items:
            continue
        _, _, fields = next(group_and_batch_mm_kwargs(items, device=runner.device, pin_memory=PIN_MEMORY))
        yield LargestStep(modality, num_items, num_rows, functools.partial(model.embed_multimodal, **fields))


def _memory(device: torch.device) -> GpuMemory:
    """Memory of the GPU after everything on it; raises what its kernels raise."""
    torch.cuda.synchronize(device)
    num_free, num_bytes = torch.cuda.mem_get_info(device)
    return GpuMemory(num_bytes, num_free, torch.cuda.memory_reserved(device))
