"""A renderer's cache of processed items, as vLLM's renderer asks it. Ours cache nothing."""

from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.utils.cache import CacheInfo


class ItemCache(BaseMultiModalProcessorCache):
    """What both of ours do not need."""

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        pass

    def clear_cache(self) -> None:
        pass

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        return CacheInfo(hits=0, total=0)
