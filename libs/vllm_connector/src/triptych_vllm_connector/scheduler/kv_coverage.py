"""Whether an engine that decodes may go on from a KV cache. Pure."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

MAX_REMEMBERED = 16_384  # KV caches that were read last


def covers_items(mm_features: Sequence[Any], num_computed_tokens: int, num_tokens: int) -> bool:
    """Whether nothing of an item is left to compute. `mm_features`: vLLM's, of a request.

    vLLM computes the last token again where all of them are there.
    """
    first = min(num_computed_tokens, num_tokens - 1)
    return not any(_has_embeds_from(feature.mm_position, first) for feature in mm_features)


def _has_embeds_from(position: Any, first_token: int) -> bool:
    start = max(0, first_token - position.offset)
    if start >= position.length:
        return False
    first_embed, end_embed = position.get_embeds_indices_in_range(start, position.length)
    return bool(end_embed > first_embed)


class KvReads:
    """Which KV caches of others requests have named: each may be read once."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._named: OrderedDict[tuple[str, str], None] = OrderedDict()

    def name(self, params: dict[str, Any]) -> bool:
        """By a request's `kv_transfer_params`. False: another request has named it before."""
        key = (str(params.get("remote_engine_id")), str(params.get("remote_request_id")))
        if key in self._named:
            return False
        self._named[key] = None
        if len(self._named) > self._max_remembered:
            self._named.popitem(last=False)
        return True
