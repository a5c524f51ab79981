"""Encoder: records what the renderer made of an item.

vLLM's processor hands each processed item to the renderer's cache of processed items, with its resolved
updates of the prompt. `ItemRecorder` is such a cache; it keeps only the last item's record.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)
from vllm.multimodal.processing.processor import ResolvedPromptUpdate
from vllm.utils.cache import CacheInfo

from triptych_common.protocol.item_record import Batching, ItemRecord, PlaceholderUpdate, RecordField
from triptych_vllm_connector.records.item_fields import is_for_language_model
from triptych_vllm_connector.records.packing import NotRecordableError, pack_tensor, pack_tokens, pack_value

MAX_UNDECLARED_BYTES = 64 << 10
"""Maximum size of a field that `item_fields` does not name: in a model from outside vLLM it may be media."""

_BATCHING: tuple[tuple[type[BaseMultiModalField], Batching], ...] = (
    (MultiModalBatchedField, Batching.BATCHED),
    (MultiModalFlatField, Batching.FLAT),
    (MultiModalSharedField, Batching.SHARED),
)


class ItemCache(BaseMultiModalProcessorCache):
    """Methods of vLLM's cache that neither subclass needs."""

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        pass

    def clear_cache(self) -> None:
        pass

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        return CacheInfo(hits=0, total=0)


class ItemRecorder(ItemCache):
    """Cache of a renderer that processes one item at a time."""

    def __init__(self, declared_fields: Callable[[str], Collection[str]]) -> None:
        """`declared_fields` returns a modality's fields that vLLM's parser declares for language models."""
        self._declared_fields = declared_fields
        self._last: tuple[MultiModalKwargsItem, Sequence[ResolvedPromptUpdate]] | None = None

    def is_cached_item(self, mm_hash: str) -> bool:
        return False

    def get_and_update_item(
        self, mm_item: tuple[MultiModalKwargsItem, Sequence[ResolvedPromptUpdate]] | None, mm_hash: str
    ) -> tuple[MultiModalKwargsItem | None, Sequence[ResolvedPromptUpdate]]:
        if mm_item is None:
            raise ValueError("an item without media")
        self._last = mm_item
        return mm_item

    def forget(self) -> None:
        """Forget the last item; the next record is of an item processed from now on."""
        self._last = None

    def take_record(self) -> ItemRecord:
        """Record of the last processed item.

        Raises:
            NotRecordableError: the model cannot be served this way.
        """
        if self._last is None:
            raise NotRecordableError("an item that vLLM does not process as others")
        (item, updates), self._last = self._last, None
        declared = self._declared_fields(updates[0].modality) if updates else ()
        return record_of(item, updates, declared)


def record_of(
    item: MultiModalKwargsItem, updates: Sequence[ResolvedPromptUpdate], declared: Collection[str]
) -> ItemRecord:
    """Return the fields of a processed item that the language model reads, and its placeholder.

    Args:
        declared: see `is_for_language_model`.

    Raises:
        NotRecordableError: the model cannot be served this way.
    """
    if not updates:
        raise NotRecordableError("an item that nothing stands for in the prompt")
    return ItemRecord(
        fields=tuple(
            _field(name, element)
            for name, element in sorted(item.items())
            if is_for_language_model(name, element, declared) and _fits(name, element, declared)
        ),
        updates=tuple(_update(update) for update in updates),
    )


def _fits(name: str, element: Any, declared: Collection[str]) -> bool:
    """True if the field may be recorded; raises NotRecordableError for a large one that only the encoder may
    read."""
    data, field = element.data, element.field
    if field.keep_on_cpu or name in declared or not isinstance(data, torch.Tensor):
        return True
    if data.nbytes > MAX_UNDECLARED_BYTES:
        raise NotRecordableError(f"the field {name} of {data.nbytes} bytes, which may be pixels or samples")
    return True


def _field(name: str, element: Any) -> RecordField:
    for cls, batching in _BATCHING:
        if isinstance(element.field, cls):
            return RecordField(
                name=name,
                batching=batching,
                dim=getattr(element.field, "dim", 0),
                keep_on_cpu=element.field.keep_on_cpu,
                value=pack_value(element.data),
            )
    raise NotRecordableError(f"the field {name}, batched in a way of its own")


def _update(update: ResolvedPromptUpdate) -> PlaceholderUpdate:
    if not isinstance(update.target, (list, tuple)) or not update.target:
        raise NotRecordableError("a placeholder that is found by its place, not by its tokens")
    details = update.content
    is_embed = None if details.is_embed is None else pack_tensor(details.is_embed(details.full).bool())
    return PlaceholderUpdate(
        mode=update.mode.value,
        target=tuple(update.target),
        tokens=pack_tokens(details.full),
        is_embed=is_embed,
    )
