"""Base of the caches of processed items that replace vLLM's in renderers; they cache nothing."""

from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.utils.cache import CacheInfo


class ItemCache(BaseMultiModalProcessorCache):
    """Methods of vLLM's cache that neither subclass needs."""

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        pass

    def clear_cache(self) -> None:
        pass

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        return CacheInfo(hits=0, total=0)
