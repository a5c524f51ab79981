"""How large one item may be for an engine."""

from typing import Any

from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget


def encoder_cache_embeds(vllm_config: Any) -> int:
    """Rows that vLLM's encoder cache holds, so the largest item, as its scheduler counts. Takes seconds."""
    return int(MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY, enable_cache=False).encoder_cache_size)
