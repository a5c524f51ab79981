"""Rows of encoder output that an engine holds, and the preallocator's budget of them.

All rows of one model have one size, so a bound in bytes is a bound in rows.
"""

from typing import Any

from triptych_vllm_connector.config import ConnectorConfig


def encoder_cache_embeds(vllm_config: Any) -> int:
    """Rows that vLLM's encoder cache holds, so the largest item, as its scheduler counts. Takes seconds."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    return int(MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY, enable_cache=False).encoder_cache_size)


def row_num_bytes(model_config: Any) -> int:
    """Bytes of one row of encoder output: `[width]`, with DeepStack one hidden state for each of its layers.

    `model_config` is vLLM's.
    """
    vision = getattr(model_config.hf_config, "vision_config", None)
    num_deepstack_layers = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    width = model_config.get_inputs_embeds_size() * (1 + num_deepstack_layers)
    return int(width * model_config.dtype.itemsize)


def budget_embeds(config: ConnectorConfig, cache_embeds: int, model_config: Any) -> int:
    """Rows that may be held for requests at once, at least one.

    Args:
        cache_embeds: rows of vLLM's encoder cache; used if `config.budget_embeds` is not set.
    """
    rows = config.budget_embeds or cache_embeds
    if config.budget_num_bytes is not None:
        rows = min(rows, config.budget_num_bytes // row_num_bytes(model_config))
    return max(rows, 1)
