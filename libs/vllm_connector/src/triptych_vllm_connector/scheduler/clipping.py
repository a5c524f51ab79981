"""Whether prompts may be computed in parts of any length: overlap and prompt chunks need it."""

from typing import Any


def can_clip(scheduler: Any) -> bool:
    """Can one of vLLM's schedulers clip a prompt anywhere, and does nothing else move its KV blocks?"""
    return bool(
        scheduler.scheduler_config.enable_chunked_prefill
        and not scheduler.is_encoder_decoder
        and not scheduler.need_mamba_block_aligned_split
        and scheduler.connector is None
    )
