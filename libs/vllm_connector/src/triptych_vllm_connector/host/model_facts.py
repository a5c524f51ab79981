"""Facts of a model that its engine announces: media that it takes, and their placeholder tokens."""

from typing import Any

from triptych_common.protocol.messages import Modality
from triptych_vllm_connector.config import ConnectorConfig

MAX_PLACEHOLDER_TOKENS = 64


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


def item_limits(processor: Any) -> dict[Modality, int]:
    """Number of raw items that a request may have, by modality; `processor` is vLLM's for media."""
    limits = processor.info.allowed_mm_limits
    return {each: limits[each] for each in Modality if limits.get(each, 0) > 0}


def placeholder_text(processor: Any, modality: str) -> str:
    text: str = processor.dummy_inputs.get_dummy_text({modality: 1})
    return text


def placeholder_tokens(processor: Any, tokenizer: Any) -> tuple[str, ...]:
    """Texts that stand for items or enclose them, which no caller's text may contain.

    They are special tokens, or the whole text where it is none and vLLM searches for it as text. `processor`
    is None for a text-only model.
    """
    if processor is None:
        return ()
    found: set[str] = set()
    added = tokenizer.get_added_vocab()
    for modality in processor.info.supported_mm_limits:
        text = placeholder_text(processor, modality).strip()
        tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))
        found |= {token for token in tokens if token in added} or ({text} if text else set())
    return tuple(sorted(found))[:MAX_PLACEHOLDER_TOKENS]
