"""Local encode: decides which requests an instance with a vision tower encodes itself. Pure.

A request with a gateway's `ec_transfer_params` gets its tensors from encoders, even here: it holds metadata,
no pixels. Without them it is encoded here if all its media came along: a scheduled item that has no pixels
would end the engine.
"""

from collections.abc import Callable
from typing import Any


class LocalEncode:
    """`metadata_fields(modality)` returns the keys of an item's data that only size its placeholder."""

    def __init__(self, metadata_fields: Callable[[str], set[str]]) -> None:
        self._metadata_fields = metadata_fields

    def encodes_request(self, request: Any) -> bool:
        """True if this instance encodes the items of `request` (vLLM's)."""
        return request.ec_transfer_params is None and all(map(self.has_media, request.mm_features))

    def has_media(self, feature: Any) -> bool:
        """True if `feature` (vLLM's) came with its media, not with metadata alone."""
        return feature.data is not None and not set(feature.data) <= self._metadata_fields(feature.modality)


def encodes_no_request(request: Any) -> bool:
    """`encodes_request` of an instance without a vision tower."""
    return False
