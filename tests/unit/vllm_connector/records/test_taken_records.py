"""vLLM's endpoints for chats know a request's items while it is served, and its records go no further."""

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from tests.support.item_records import item_record
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import ECTransferParams, ItemTransfer, Modality

pytest.importorskip("vllm")
from triptych_vllm_connector.records.replaying import (
    _refusing_placeholders,
    _taking_records,
    _taking_records_of_count,
    request_items,
)

ITEM = MmHash("a" * 64)
PARAMS = ECTransferParams(
    request_id="r",
    gateway="g",
    traceparent=None,
    remaining_ms=5,
    items=(
        ItemTransfer(
            item_index=0,
            mm_hash=ITEM,
            modality=Modality.IMAGE,
            num_embeds=4,
            record=item_record(4, (1, 4, 4)),
        ),
    ),
)
SERVING = SimpleNamespace(create_error_response=lambda message: ("400", message))


async def serve(sent: Any, *, counts: bool) -> tuple[Any, Any]:
    """(names of the items that vLLM's code finds, or its refusal; what it gets of the parameters)."""
    seen: list[Any] = []

    async def vllms(request: Any, raw_request: Any) -> list[str]:
        seen.append(request.ec_transfer_params)
        return list(request_items.get())

    async def json() -> dict[str, Any]:
        return {"ec_transfer_params": sent}

    wrap = _taking_records_of_count if counts else _taking_records
    request = SimpleNamespace(ec_transfer_params=None if counts else sent)
    answer = await wrap(SERVING, vllms)(request, SimpleNamespace(json=json))
    return answer, seen[0] if seen else None


@pytest.mark.parametrize("counts", [False, True])
async def test_items_are_those_of_the_request(counts: bool) -> None:
    names, passed = await serve(PARAMS.model_dump(mode="json"), counts=counts)
    assert names == [ITEM]
    assert counts or passed == PARAMS.without_records().model_dump(mode="json")
    later = PARAMS.model_dump(mode="json") | {"added_by_a_later_release": 1}
    assert (await serve(later, counts=counts))[0] == [ITEM]
    assert (await serve(None, counts=counts))[0] == []  # none of another request's


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("sent", [{}, {"items": []}, [], 5])
async def test_what_is_no_parameters_is_refused(sent: Any, counts: bool) -> None:
    (status, message), passed = await serve(sent, counts=counts)
    assert status == "400"
    assert "ec_transfer_params are not valid" in message
    assert passed is None


@pytest.mark.parametrize(("text", "is_refused"), [("1 2 3", False), ("an <|image_pad|> of its own", True)])
async def test_a_response_whose_text_holds_a_placeholder_is_not_gone_on_from(
    text: str, is_refused: bool
) -> None:
    """vLLM would put the text into the prompt, where the placeholder would take the next image's place."""

    class Stored(BaseModel):
        output: list[str]
        instructions: str = "an <|image_pad|> here was looked at when it came"

    serving = SimpleNamespace(response_store={"resp_1": Stored(output=[text])}, **vars(SERVING))

    async def create(request: Any) -> str:
        return "created"

    guarded = _refusing_placeholders(serving, create, ("<|image_pad|>",))
    answer = await guarded(SimpleNamespace(previous_response_id="resp_1"))
    assert (answer[0] == "400") == is_refused
    for other in (None, "resp_2"):  # vLLM itself knows what to say
        assert await guarded(SimpleNamespace(previous_response_id=other)) == "created"
