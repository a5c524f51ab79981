"""URLs that stand for media items, where a request can name media by URL alone.

    triptych-item:{mm_hash}           an item that an encoder makes; its record is in `ec_transfer_params`
    triptych-item:{id},data:…         raw media, by the name that vLLM's caches know them by

Gateway -> prefill_decode, in the places of `/v1/messages` and `/v1/responses` where vLLM reads an image's
URL: it turns these requests into chats itself, in which no part can have a `uuid`. Callers cannot send them:
the gateway takes no such scheme from them. Nothing is ever fetched for them.
"""

import re
from dataclasses import dataclass

from triptych_common.protocol.ids import MmHash

SCHEME = "triptych-item:"
_DATA = "data:"
_ITEM_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ItemUrl:
    """Id and raw media of a parsed item URL."""

    item_id: str  # an mm_hash; of raw media `domain.hashing.raw_item_id`
    data_url: str | None  # of raw media


def item_url(mm_hash: MmHash) -> str:
    return f"{SCHEME}{mm_hash}"


def raw_item_url(item_id: str, data_url: str) -> str:
    """Return the URL of raw media that vLLM caches under `item_id`."""
    return f"{SCHEME}{item_id},{data_url}"


def parse_item_url(url: str) -> ItemUrl | None:
    """Parse an item URL; None for any other URL. Raises ValueError: it is of this scheme and malformed."""
    if not url.startswith(SCHEME):
        return None
    item_id, comma, data_url = url[len(SCHEME) :].partition(",")
    if _ITEM_ID.fullmatch(item_id) is None or (comma and not data_url.startswith(_DATA)):
        raise ValueError("a malformed URL of a media item")
    return ItemUrl(item_id, data_url if comma else None)
