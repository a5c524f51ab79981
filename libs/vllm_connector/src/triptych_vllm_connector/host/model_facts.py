"""Facts of a model that its engine announces: media that it takes, and their placeholder tokens."""

from typing import Any

from triptych_common.protocol.messages import Modality

MAX_PLACEHOLDER_TOKENS = 64


def item_limits(processor: Any) -> dict[Modality, int]:
    """Number of raw items that a request may have, by modality; `processor` is vLLM's for media."""
    limits = processor.info.allowed_mm_limits
    return {each: limits[each] for each in Modality if limits.get(each, 0) > 0}


def placeholder_text(processor: Any, modality: str) -> str:
    """Text of a prompt with one item of the modality."""
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
