"""The body for prefill_decode: exactly our keys, each item in its place."""

from typing import Any

import orjson
import pytest

from tests.support.item_records import item_record
from triptych_common.domain.errors import RequestError
from triptych_common.domain.hashing import raw_item_id
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import ECTransferParams, InstanceRecord, Modality, Role
from triptych_gateway.encode.sizes import ItemSizes
from triptych_gateway.endpoints.endpoint import ChatForm, Endpoint, EndpointKind
from triptych_gateway.proxy.upstream_body import check_fits, media_body, text_body, whole_body
from triptych_gateway.request.chat_request import ChatRequest, parse_chat_request
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.image_header import ImageHeader
from triptych_gateway.request.media import TakenItem
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard

A, B = MmHash("a" * 64), MmHash("b" * 64)
SIZES = {
    A: ItemSizes(num_embeds=4, record=item_record(4, (1, 4, 4))),
    B: ItemSizes(num_embeds=9, record=item_record(9, (1, 6, 6))),
}


def image(uuid: str | None = None) -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,AAAA"},
        "uuid": uuid,
        "detail": "low",
    }


@pytest.fixture
def request_() -> ChatRequest:
    content = [
        {"type": "text", "text": "one"},
        image("mine"),
        {"type": "text", "text": "two"},
        image(),
        image(),
    ]
    body = {
        "model": "m",
        "top_k": 5,
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": content, "name": "n"}],
    }
    return parse_chat_request(orjson.dumps(body), PlaceholderGuard(()), 8)


def items(request: ChatRequest, *hashes: MmHash) -> list[TakenItem]:
    return [
        TakenItem(part, mm_hash, b"x", ImageHeader("PNG", 1, 1), {}, {})
        for part, mm_hash in zip(request.media, hashes, strict=True)
    ]


def test_media_are_replaced_in_their_places(request_: ChatRequest) -> None:
    before = orjson.dumps(request_.body)
    body = orjson.loads(
        media_body(
            request_,
            items(request_, A, B, A),
            SIZES,
            request_id="r",
            gateway="g",
            traceparent="tp",
            remaining_ms=-5,
            flow="f",
        )
    )
    content = body["messages"][1]["content"]

    def embeds(mm_hash: MmHash) -> dict[str, Any]:
        return {"type": "image_embeds", "image_embeds": None, "uuid": mm_hash}

    assert content == [
        {"type": "text", "text": "one"},
        embeds(A),
        {"type": "text", "text": "two"},
        embeds(B),
        embeds(A),
    ]
    assert body["top_k"] == 5
    assert body["messages"][1]["name"] == "n"
    params = ECTransferParams.model_validate_json(orjson.dumps(body["ec_transfer_params"]))
    assert (params.request_id, params.gateway, params.traceparent, params.remaining_ms) == ("r", "g", "tp", 1)
    assert params.flow == "f"
    assert [(i.item_index, i.mm_hash, i.modality, i.num_embeds, i.record) for i in params.items] == [
        (0, A, "image", 4, SIZES[A].record),
        (1, B, "image", 9, SIZES[B].record),
        (2, A, "image", 4, SIZES[A].record),
    ]
    assert orjson.dumps(request_.body) == before


def test_an_item_that_never_fits_is_refused(request_: ChatRequest) -> None:
    record = InstanceRecord(instance="p", boot_id="b", role=Role.PREFILL_DECODE, max_item_embeds=4)
    with pytest.raises(RequestError) as caught:
        check_fits(items(request_, A, B, A), SIZES, record)
    assert (caught.value.status_code, caught.value.param) == (413, "messages[1].content[3].image_url.url")
    check_fits(items(request_, A, A, A), SIZES, record)


def test_nesting_that_cannot_be_written_is_the_callers_fault() -> None:
    deep: Any = "x"
    for _ in range(600):
        deep = [deep]
    request = ChatRequest({"model": "m", "tools": deep}, "m", False, (), {}, {})
    with pytest.raises(RequestError) as caught:
        text_body(request)
    assert caught.value.status_code == 400


MESSAGES = Endpoint("/v1/messages", EndpointKind.CHAT, "", "", chat_form=ChatForm.MESSAGES)


def nested_request(salt: str = "") -> ChatRequest:
    """Of Anthropic's form: an image in a tool's result, and one beside it."""
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "r"}, None]}
    body = {"model": "m", "messages": [{"role": "user", "content": [result, None]}]}
    content = ("messages", 0, "content")
    parts = tuple(
        MediaPart(index, place, Modality.IMAGE, "", "")
        for index, place in enumerate(((*content, 0, "content", 1), (*content, 1)))
    )
    return ChatRequest(body, "m", False, parts, {}, {}, endpoint=MESSAGES).of_tenant(salt)


@pytest.mark.parametrize("salt", ["", "salt"])
def test_where_a_part_can_have_no_uuid_the_url_names_the_item(salt: str) -> None:
    request = nested_request(salt)
    before = orjson.dumps(request.body)
    options = {"request_id": "r", "gateway": "g", "traceparent": None, "remaining_ms": 1}
    sent = orjson.loads(media_body(request, items(request, A, B), SIZES, **options))
    result, beside = sent["messages"][0]["content"]
    assert result["content"][0] == {"type": "text", "text": "r"}
    assert result["content"][1] == {"type": "image", "source": {"type": "url", "url": f"triptych-item:{A}"}}
    assert beside == {"type": "image", "source": {"type": "url", "url": f"triptych-item:{B}"}}
    assert [item["mm_hash"] for item in sent["ec_transfer_params"]["items"]] == [A, B]
    whole = orjson.loads(whole_body(request, items(request, A, B)))
    result, beside = whole["messages"][0]["content"]
    url = "data:application/octet-stream;base64,eA=="
    for part, mm_hash in ((result["content"][1], A), (beside, B)):
        named = f"triptych-item:{raw_item_id(mm_hash)},{url}"
        assert part == {"type": "image", "source": {"type": "url", "url": named if salt else url}}
    assert orjson.dumps(request.body) == before
