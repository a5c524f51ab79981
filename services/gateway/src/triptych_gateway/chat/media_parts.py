"""The parts that stand for media in what is sent to prefill_decode, by the form of the chat.

    form           an item that an encoder makes         raw media
    completions    embeddings without them, with a uuid  a data URL, perhaps with a uuid
    others         an image with the item's URL          an image with a data URL, or the item's around it

Where a form has no place for a uuid, the URL has it (`protocol.item_urls`).
"""

from typing import Any, assert_never

from triptych_common.domain.hashing import raw_item_id
from triptych_common.protocol.item_urls import item_url, raw_item_url
from triptych_gateway.endpoints.endpoint import ChatForm
from triptych_gateway.request.media import TakenItem

Part = dict[str, Any]


def item_part(form: ChatForm, item: TakenItem) -> Part:
    """For an item that an encoder makes. vLLM reads exactly these keys."""
    if form is ChatForm.COMPLETIONS:
        # No others: vLLM reads a part with a uuid by whatever media key it finds first.
        name = f"{item.part.modality}_embeds"
        return {"type": name, name: None, "uuid": item.mm_hash}
    return _image_part(form, item_url(item.mm_hash))


def raw_part(form: ChatForm, item: TakenItem, data_url: str, *, is_named: bool) -> Part:
    """For raw media, as an instance with a vision tower takes them.

    `is_named`: by an id that no other tenant's has. Else vLLM names an item by its content.
    """
    item_id = raw_item_id(item.mm_hash) if is_named else None
    if form is ChatForm.COMPLETIONS:
        name = f"{item.part.modality}_url"
        part = {"type": name, name: {"url": data_url}}
        return part if item_id is None else {**part, "uuid": item_id}
    return _image_part(form, data_url if item_id is None else raw_item_url(item_id, data_url))


def _image_part(form: ChatForm, url: str) -> Part:
    if form is ChatForm.MESSAGES:
        return {"type": "image", "source": {"type": "url", "url": url}}
    if form is ChatForm.RESPONSES:
        return {"type": "input_image", "image_url": url, "detail": "auto"}  # vLLM makes nothing of the detail
    if form is ChatForm.COMPLETIONS:
        raise ValueError("a part of a chat completion can have a uuid")
    assert_never(form)
