"""Bad input over HTTP: the right 4xx, in OpenAI's format, naming the item; the service goes on."""

from typing import Any

import httpx
import pytest

from tests.support.gateway.samples import MODEL, data_url, image_bytes, image_part
from tests.support.gateway.system import System

URL = "messages[0].content[1].image_url.url"


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def with_image(url: Any) -> dict[str, Any]:
    return chat([{"type": "text", "text": "read"}, {"type": "image_url", "image_url": {"url": url}}])


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return dict(error)


# What else is refused: tests/unit/gateway/request, fetch/test_urls.py
BAD: list[tuple[Any, int, str, str | None]] = [
    (b"{", 400, "invalid_json", None),
    (chat("x") | {"model": "other"}, 404, "model_not_found", "model"),
    ({"model": MODEL}, 400, "missing_field", "messages"),
    (with_image("data:image/png;base64,@@@@"), 400, "invalid_base64", URL),
    (with_image(data_url(b"these are no pixels")), 400, "invalid_image", URL),
    (with_image("https://127.0.0.1/a.png"), 400, "url_not_allowed", URL),
    (with_image("file:///etc/passwd"), 400, "url_not_allowed", URL),
    (chat("<|vision_start|><|image_pad|><|vision_end|>"), 400, "placeholder_in_text", "messages[0].content"),
    (chat([image_part()] * 65), 400, "too_many_items", "messages[0].content[64].image_url.url"),
]


async def test_bad_input(system: System) -> None:
    for body, status, code, param in BAD:
        answer = await system.post(body)
        error = error_of(answer)
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param), answer.text
        assert answer.headers["x-request-id"].startswith("req-")
    assert system.encoder.jobs == []
    assert system.prefill_decode.bodies == []
    assert (await system.ask("still there")).choices


@pytest.mark.parametrize(
    "system", [{"max_body_bytes": 2000, "max_item_bytes": 1000, "max_image_pixels": 100}], indirect=True
)
async def test_limits(system: System) -> None:
    too_many_pixels = await system.post(with_image(data_url(image_bytes(size=(11, 11)))))
    assert (too_many_pixels.status_code, error_of(too_many_pixels)["code"]) == (413, "image_too_large")
    too_large = await system.post(with_image(data_url(bytes(1001))))
    assert (too_large.status_code, error_of(too_large)["code"]) == (413, "media_too_large")
    assert error_of(too_large)["param"] == URL
    body = await system.post(chat("x" * 3000))
    assert (body.status_code, error_of(body)["code"]) == (413, "body_too_large")

    async def chunks() -> Any:
        for _ in range(30):
            yield b" " * 100

    chunked = await system.http.post("/v1/chat/completions", content=chunks())
    assert (chunked.status_code, error_of(chunked)["code"]) == (413, "body_too_large")
