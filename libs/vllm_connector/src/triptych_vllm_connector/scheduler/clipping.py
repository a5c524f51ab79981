"""Check that prompts may be computed in parts of any length, which overlap and prompt chunks require."""

from typing import Any


def can_clip(scheduler: Any) -> bool:
    """True if vLLM's scheduler can clip a prompt anywhere and nothing else moves its KV blocks."""
    return bool(
        scheduler.scheduler_config.enable_chunked_prefill
        and not scheduler.is_encoder_decoder
        and not scheduler.need_mamba_block_aligned_split
        and scheduler.connector is None
    )
