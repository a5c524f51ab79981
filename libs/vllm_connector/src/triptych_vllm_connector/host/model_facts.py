"""What an engine announces of its model: which media it takes, and which tokens stand for them."""

from typing import Any

from triptych_common.protocol.messages import Modality

MAX_PLACEHOLDER_TOKENS = 64


def item_limits(processor: Any) -> dict[Modality, int]:
    """Items of a request that the engine takes raw, by modality. `processor`: vLLM's for media."""
    limits = processor.info.allowed_mm_limits
    return {each: limits[each] for each in Modality if limits.get(each, 0) > 0}


def placeholder_text(processor: Any, modality: str) -> str:
    """The text of a prompt with one item."""
    text: str = processor.dummy_inputs.get_dummy_text({modality: 1})
    return text


def placeholder_tokens(processor: Any, tokenizer: Any) -> tuple[str, ...]:
    """What stands for items in a prompt, or around them: no text of a caller may hold it.

    Special tokens; or the whole text, where it is none, and vLLM looks for it as text. `processor`: None for
    a model of text alone.
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
