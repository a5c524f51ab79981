"""Which requests an instance with a vision tower encodes itself. Pure.

A request that a gateway sent with `ec_transfer_params` gets its tensors from encoders, even here: it holds
metadata, no pixels. Without them it is encoded here, if all its media came along: a scheduled item that has
no pixels would end the engine.
"""

from collections.abc import Callable
from typing import Any


class LocalEncode:
    """`metadata_fields(modality)`: keys of an item's data that only size its placeholder."""

    def __init__(self, metadata_fields: Callable[[str], set[str]]) -> None:
        self._metadata_fields = metadata_fields

    def encodes_request(self, request: Any) -> bool:
        """Are the items of `request` (vLLM's) encoded by this instance?"""
        return request.ec_transfer_params is None and all(map(self.has_media, request.mm_features))

    def has_media(self, feature: Any) -> bool:
        """Did the item come with its media, not with metadata alone? `feature`: vLLM's."""
        return feature.data is not None and not set(feature.data) <= self._metadata_fields(feature.modality)


def encodes_no_request(request: Any) -> bool:
    """`encodes_request` of an instance without a vision tower."""
    return False
