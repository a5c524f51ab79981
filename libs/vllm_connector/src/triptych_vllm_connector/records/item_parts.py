"""prefill_decode: items that are named by URLs, in endpoints where a part can have no uuid.

vLLM turns requests of these endpoints into chats by itself, and each chat goes through its parser of content
parts. There an item's URL becomes what a part with the item's uuid is in a chat completion.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers import chat_utils

from triptych_common.protocol.item_urls import parse_item_url
from triptych_common.protocol.messages import ItemTransfer, Modality

request_items: ContextVar[Mapping[str, ItemTransfer]] = ContextVar("triptych_request_items")
"""Those of the request that is being served, by mm_hash."""

StockParser: Any = chat_utils.AsyncMultiModalContentParser


class ItemUrlParser(StockParser):
    """vLLM's parser of content parts, which also takes images that are named by an item's URL."""

    def parse_image(self, image_url: str | None, uuid: str | None = None) -> None:
        """Raises VLLMValidationError: the URL names no item of its request."""
        try:
            named = None if image_url is None else parse_item_url(image_url)
        except ValueError as error:
            raise _refused(str(error)) from error
        if named is None:
            super().parse_image(image_url, uuid)
        elif named.data_url is not None:
            super().parse_image(named.data_url, named.item_id)
        else:
            item = request_items.get({}).get(named.item_id)
            if item is None or item.modality is not Modality.IMAGE:
                raise _refused("the URL of a media item that the request does not have")
            self.parse_image_embeds(None, named.item_id)


def read_item_urls() -> None:
    """From now on vLLM parses the parts of chats so, in this process."""
    chat_utils.AsyncMultiModalContentParser = ItemUrlParser


def _refused(message: str) -> Exception:
    return VLLMValidationError(message, parameter="messages")
