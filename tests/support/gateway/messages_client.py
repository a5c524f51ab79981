"""Anthropic's client in front of a gateway, and what is asked by it."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic

from tests.support.gateway.media_samples import image_bytes
from tests.support.gateway.serving import MODEL
from tests.support.gateway.system import System
from triptych_common.protocol.item_urls import parse_item_url

WORDS = "word0 word1 word2"
BODY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "a"}],
}


@asynccontextmanager
async def client_of(system: System, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=system.gateway.settings.local_urls[0], api_key=key, max_retries=0, timeout=20
    ) as client:
        yield client


async def ask(client: anthropic.AsyncAnthropic, content: Any, **options: Any) -> Any:
    """One message; its text where it is streamed, to its end."""
    messages: Any = [{"role": "user", "content": content}]
    return await client.messages.create(model=MODEL, max_tokens=5, messages=messages, **options)


async def streamed(client: anthropic.AsyncAnthropic, content: Any, **options: Any) -> Any:
    """The message that the client puts together."""
    messages: Any = [{"role": "user", "content": content}]
    async with client.messages.stream(model=MODEL, max_tokens=5, messages=messages, **options) as stream:
        return await stream.get_final_message()


def image(color: int = 1, size: tuple[int, int] = (8, 8)) -> dict[str, Any]:
    data = base64.b64encode(image_bytes(color, size)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def hash_of(block: dict[str, Any]) -> str:
    """Of an item that is sent by its URL."""
    assert block.keys() == {"type", "source"}
    assert block["source"].keys() == {"type", "url"}
    named = parse_item_url(block["source"]["url"])
    assert named is not None
    assert named.data_url is None
    return named.item_id
