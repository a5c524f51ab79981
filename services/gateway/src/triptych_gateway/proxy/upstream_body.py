"""Body for prefill_decode: metadata instead of media, and the items to wait for.

Or, when no encoder can be had, the whole request, for an instance that encodes itself. The part that stands
for an item depends on the form of the chat:

    form           an item that an encoder makes         raw media
    completions    embeddings without them, with a uuid  a data URL, perhaps with a uuid
    others         an image with the item's URL          an image with a data URL, or the item's around it

Where a form has no place for a uuid, the URL has it (`protocol.item_urls`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, assert_never

import orjson
from pybase64 import b64encode_as_string

from triptych_common.domain.errors import RequestError
from triptych_common.domain.hashing import raw_item_id
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.item_urls import item_url, raw_item_url
from triptych_common.protocol.messages import ECTransferParams, InstanceRecord, ItemTransfer
from triptych_gateway.access.request_limiter import Booking
from triptych_gateway.encode.sizes import ItemSizes
from triptych_gateway.endpoints.endpoint import ChatForm
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.content_parts import KnownFile, replace_at
from triptych_gateway.request.media import TakenItem
from triptych_gateway.request.text_request import TextRequest

Part = dict[str, Any]


def text_body(request: ChatRequest | TextRequest) -> bytes:
    """Return the body of a request without media."""
    return _dump(request.body)


def book_whole(items: Sequence[TakenItem], booking: Booking, max_body_bytes: int) -> None:
    """Book the memory of the files among `items`: each once raw, and as base64 in every place.

    Other media are bounded by the request that brought them.

    Raises:
        RequestError: 413, more than a body may have; 429, more than there is room for.
    """
    files = [item for item in items if isinstance(item.content, KnownFile)]
    sizes = {item.mm_hash: item.num_bytes for item in files}
    num_text = sum((sizes[item.mm_hash] + 2) // 3 * 4 for item in files)
    if num_text > max_body_bytes:
        message = f"its files make the request larger than {max_body_bytes} bytes"
        raise RequestError(413, "body_too_large", message, files[0].part.path)
    booking.resize(booking.num_bytes + sum(sizes.values()) + num_text)


def whole_body(request: ChatRequest, items: Sequence[TakenItem]) -> bytes:
    """Return the body with raw media, for an instance with a vision tower. Milliseconds per MB.

    Nothing in it comes from the caller's own media parts: the bytes are those that were checked, as data
    URLs. A tenant's get names that no other tenant's have.
    A request that has options for its media is not sent so.
    """
    urls = {item.mm_hash: _data_url(item) for item in items}
    form, is_named = request.endpoint.chat_form, bool(request.tenant_salt)
    return _dump(
        _replace_parts(
            request, items, lambda item: raw_part(form, item, urls[item.mm_hash], is_named=is_named)
        )
    )


def named_body(request: ChatRequest, items: Sequence[TakenItem]) -> bytes:
    """Return the body with each item replaced by its identity: the same one however the media are sent."""
    return _dump(_replace_parts(request, items, partial(item_part, request.endpoint.chat_form)))


def media_body(
    request: ChatRequest,
    items: Sequence[TakenItem],
    sizes: Mapping[MmHash, ItemSizes],
    *,
    request_id: str,
    gateway: str,
    traceparent: str | None,
    remaining_ms: int,
    flow: str = "",
) -> bytes:
    """Return the body with each item replaced by its identity, and the records beside."""
    body = _replace_parts(request, items, partial(item_part, request.endpoint.chat_form))
    params = ECTransferParams(
        request_id=request_id,
        gateway=gateway,
        traceparent=traceparent,
        remaining_ms=max(remaining_ms, 1),
        flow=flow,
        items=tuple(
            ItemTransfer(
                item_index=item.part.item_index,
                mm_hash=item.mm_hash,
                modality=item.part.modality,
                num_embeds=sizes[item.mm_hash].num_embeds,
                record=sizes[item.mm_hash].record,
            )
            for item in items
        ),
    )
    return _dump({**body, "ec_transfer_params": params.model_dump(mode="json")})


def check_fits(items: Sequence[TakenItem], sizes: Mapping[MmHash, ItemSizes], record: InstanceRecord) -> None:
    """Refuse an item that `record`'s instance can never hold. Raises RequestError: 413 naming the item."""
    if record.max_item_embeds is None:
        return
    for item in items:
        num_embeds = sizes[item.mm_hash].num_embeds
        if num_embeds > record.max_item_embeds:
            limit = record.max_item_embeds
            message = f"{item.part.path} becomes {num_embeds} embeddings; at most {limit} are served"
            raise RequestError(413, f"{item.part.modality}_too_large", message, item.part.path)


def _replace_parts(
    request: ChatRequest, items: Sequence[TakenItem], part_for: Callable[[TakenItem], dict[str, Any]]
) -> dict[str, Any]:
    """Return the request's body with another part in the place of each media item."""
    own = (item for item in items if item.part.place)
    return replace_at(request.body, ((item.part.place, part_for(item)) for item in own))


def _data_url(item: TakenItem) -> str:
    """Return a data URL; vLLM ignores its media type and reads the bytes."""
    return f"data:application/octet-stream;base64,{b64encode_as_string(item.read_content())}"


def _dump(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError as error:  # orjson's limit on nesting is lower when it writes than when it reads
        raise RequestError(400, "invalid_json", "the body is nested too deeply", None) from error


def item_part(form: ChatForm, item: TakenItem) -> Part:
    """Return the part for an item that an encoder makes. vLLM reads exactly these keys."""
    if form is ChatForm.COMPLETIONS:
        # No others: vLLM reads a part with a uuid by whatever media key it finds first.
        name = f"{item.part.modality}_embeds"
        return {"type": name, name: None, "uuid": item.mm_hash}
    return _image_part(form, item_url(item.mm_hash))


def raw_part(form: ChatForm, item: TakenItem, data_url: str, *, is_named: bool) -> Part:
    """Return the part for raw media, as an instance with a vision tower takes them.

    `is_named`: give it an id of this tenant alone. Otherwise vLLM names an item by its content.
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
