"""The request for prefill_decode: metadata instead of media, and the items it will wait for."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import ECTransferParams, InstanceRecord, ItemTransfer
from triptych_gateway.chat_request import ChatRequest
from triptych_gateway.media import TakenItem
from triptych_gateway.sizes import ItemSizes


def text_body(request: ChatRequest) -> bytes:
    """Body of a request without media."""
    return _dump(request.body)


def media_body(
    request: ChatRequest,
    items: Sequence[TakenItem],
    sizes: Mapping[MmHash, ItemSizes],
    *,
    request_id: str,
    gateway: str,
    traceparent: str | None,
    remaining_ms: int,
) -> bytes:
    """Body of a request whose media are replaced by sizes and identity, each in its place."""
    messages = [dict(message) for message in request.body["messages"]]
    for item in items:
        message = messages[item.part.message_index]
        if message["content"] is request.body["messages"][item.part.message_index]["content"]:
            message["content"] = list(message["content"])
        # Exactly these keys: vLLM reads a part with a uuid by whatever media key it finds first.
        message["content"][item.part.part_index] = {
            "type": f"{item.part.modality}_embeds",
            f"{item.part.modality}_embeds": sizes[item.mm_hash].placeholder_metadata,
            "uuid": item.mm_hash,
        }
    params = ECTransferParams(
        request_id=request_id,
        gateway=gateway,
        traceparent=traceparent,
        remaining_ms=max(remaining_ms, 1),
        items=tuple(
            ItemTransfer(
                item_index=item.part.item_index,
                mm_hash=item.mm_hash,
                num_embeds=sizes[item.mm_hash].num_embeds,
            )
            for item in items
        ),
    )
    return _dump({**request.body, "messages": messages, "ec_transfer_params": params.model_dump(mode="json")})


def check_fits(items: Sequence[TakenItem], sizes: Mapping[MmHash, ItemSizes], record: InstanceRecord) -> None:
    """Refuse an item that `record`'s instance can never hold.

    Raises:
        RequestError: 413 naming the item.
    """
    if record.max_item_embeds is None:
        return
    for item in items:
        num_embeds = sizes[item.mm_hash].num_embeds
        if num_embeds > record.max_item_embeds:
            limit = record.max_item_embeds
            message = f"{item.part.path} becomes {num_embeds} embeddings; at most {limit} are served"
            raise RequestError(413, "image_too_large", message, item.part.path)


def _dump(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError as error:  # orjson's limit on nesting is lower when it writes than when it reads
        raise RequestError(400, "invalid_json", "the body is nested too deeply", None) from error
