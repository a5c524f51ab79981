"""Responses that are divided, and what is stored of them."""

from typing import Any

import pytest

from tests.integration.gateway.stages.conftest import Staged
from tests.support.gateway.media_samples import data_url, image_bytes
from tests.support.gateway.serving import MODEL

IMAGE = {"type": "input_image", "image_url": data_url(image_bytes(3))}
WITH_IMAGE = [{"role": "user", "content": [IMAGE, {"type": "input_text", "text": "what is it"}]}]


async def respond(staged: Staged, asked: Any, **options: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, "input": asked, **options}
    answer = await staged.system.http.post("/v1/responses", json=body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("asked", ["hello", WITH_IMAGE])
async def test_a_response_is_divided(staged: Staged, asked: Any) -> None:
    status, response = await respond(staged, asked, max_output_tokens=9)
    assert (status, response["status"]) == (200, "completed"), response
    assert "kv_transfer_params" not in response
    (first,), (second,) = staged.prefill.bodies, staged.decode.bodies
    assert (first["max_output_tokens"], first["store"], first["stream"]) == (1, False, False)
    assert (second["max_output_tokens"], second["request_id"]) == (9, first["request_id"])
    assert len(staged.decode.taken) == 1
    stream = await staged.system.openai.responses.create(model=MODEL, input=asked, stream=True)
    events = [each.type async for each in stream]
    assert (events[0], events[-1]) == ("response.created", "response.completed")
    assert len(staged.decode.taken) == 2


async def test_a_stored_one_is_gone_on_from_where_it_was_decoded(staged: Staged) -> None:
    staged.decode.stores_responses = True
    assert staged.decode.registration is not None
    await staged.decode.registration.update(stores_responses=True)
    await staged.system.refresh()
    _, first = await respond(staged, "hello")
    status, second = await respond(staged, "and then?", previous_response_id=first["id"])
    assert status == 200, second
    assert (len(staged.prefill.bodies), len(staged.decode.bodies)) == (1, 2)
    status, refused = await respond(staged, WITH_IMAGE, previous_response_id=first["id"])
    assert (status, refused["error"]["code"]) == (400, "unsupported")
    _, of_image = await respond(staged, WITH_IMAGE)
    status, missing = await respond(staged, "and then?", previous_response_id=of_image["id"])
    assert (status, missing["error"]["code"]) == (404, "response_not_found")
