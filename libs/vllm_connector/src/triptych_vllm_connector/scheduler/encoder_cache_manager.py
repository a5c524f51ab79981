"""Encoder cache managers, put into vLLM by `--ec-manager-config`.

vLLM's own evicts only under pressure, so an idle engine would keep its views, and the store's pins,
for ever. These drop an entry with its last use.
"""

from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from triptych_vllm_connector.consumer.consumer import Consumer
from triptych_vllm_connector.consumer.item_pins import EngineItemState
from triptych_vllm_connector.seams.current import seam

_UNBOUNDED = 1 << 62


class _EvictingManager(EncoderCacheManager):
    """Adds `evict_item`: drop one entry now, whatever refers to it."""

    def evict_item(self, mm_hash: str) -> None:
        """Drop the entry; the worker drops its tensor at the next step. Idempotent."""
        if mm_hash not in self.cached:
            return
        num_embeds = self.num_embeds_by_hash.pop(mm_hash)
        if self.freeable.pop(mm_hash, None) is None:
            self.num_freeable_slots += num_embeds
        self.num_free_slots += num_embeds
        del self.cached[mm_hash]
        self.freed.append(mm_hash)


class PreallocatingEncoderCacheManager(_EvictingManager):
    """prefill_decode's manager: an entry lives as long as a request that was granted it (see `Consumer`).

    The consumer's `Preallocator` keeps the two-step bookkeeping. `can_allocate` is False for a remote item
    that is not pinned, so that the scheduler clips the step in front of it and never plans an encode that
    this instance cannot run; and for an item to be encoded here that has no space yet.
    """

    consumer: Consumer | None = None
    budget_embeds: int = 0  # rows of vLLM's encoder cache, which are the preallocator's budget

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: Any) -> "PreallocatingEncoderCacheManager":
        """Create a manager without a limit of its own: vLLM's count must never evict what the preallocator
        granted."""
        manager = cls(cache_size=_UNBOUNDED)
        manager.budget_embeds = cache_size
        return manager

    def attach_consumer(self, consumer: Consumer) -> None:
        """Set the consumer, which needs this manager, so vLLM makes the manager first."""
        self.consumer = consumer

    def evict_item(self, mm_hash: str) -> None:
        """Drop the entry, unless a local request refers to it: a step being planned may read it."""
        holders = self.cached.get(mm_hash, ())
        if self.consumer is None or not any(self.consumer.status(each).is_local for each in holders):
            super().evict_item(mm_hash)

    def is_in_use(self, engine_request_id: str, item_index: int) -> bool:
        """True if the item was scheduled at this place, so that a step under way may read it."""
        return item_index in self.request_cached_ids.get(engine_request_id, ())

    def can_allocate(
        self, request: Any, input_id: int, encoder_compute_budget: int, num_embeds_to_schedule: int
    ) -> bool:
        if self.consumer is not None:
            status = self.consumer.status(request.request_id)
            if status.is_local:
                may_allocate = status.may_encode(input_id)
            else:
                state = self.consumer.item_state(request.mm_features[input_id].identifier)
                may_allocate = state is EngineItemState.PINNED
                # A load costs no encoder compute: only space counts.
                encoder_compute_budget = max(encoder_compute_budget, request.get_num_encoder_embeds(input_id))
            if not may_allocate:
                return False
        return super().can_allocate(request, input_id, encoder_compute_budget, num_embeds_to_schedule)

    def free_encoder_input(self, request: Any, input_id: int) -> None:
        """Drop vLLM's reference; a view that a granted request needs stays until the consumer evicts it.

        Other entries go with their last reference: items encoded here, and items the consumer has released.
        """
        super().free_encoder_input(request, input_id)
        mm_hash = request.mm_features[input_id].identifier
        is_held = self.consumer is not None and self.consumer.item_state(mm_hash) is EngineItemState.RESIDENT
        if mm_hash in self.freeable and not is_held:
            self.evict_item(mm_hash)


class ForgettingEncoderCacheManager(_EvictingManager):
    """Encoder's manager, which caches nothing: the store is the cache; a hit here would skip the handover."""

    def check_and_update_cache(self, request: Any, input_id: int) -> bool:
        """True only for the request's own items: a prompt longer than a step is still encoded once."""
        return input_id in self.get_cached_input_ids(request)

    def allocate(self, request: Any, input_id: int) -> None:
        """Allocate; two requests with the same item share one entry, counted once."""
        mm_hash = request.mm_features[input_id].identifier
        if mm_hash not in self.cached:
            super().allocate(request, input_id)
            return
        if self.freeable.pop(mm_hash, None) is not None:
            self.num_freeable_slots -= self.num_embeds_by_hash[mm_hash]
        self.cached[mm_hash].add(request.request_id)
        seam.add_cached_input(self, request.request_id, input_id, mm_hash)

    def free_encoder_input(self, request: Any, input_id: int) -> None:
        super().free_encoder_input(request, input_id)
        mm_hash = request.mm_features[input_id].identifier
        if mm_hash in self.freeable:
            self.evict_item(mm_hash)
