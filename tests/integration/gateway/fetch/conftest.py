"""A server that may be fetched from, and one that must never be reached."""

import functools
from collections.abc import AsyncIterator

import pytest

from tests.support.gateway.media_server import FORBIDDEN, MediaServer, answering
from tests.support.gateway.samples import image_bytes
from triptych_gateway.fetch import client

tls_context = functools.cache(client.tls_context)


@pytest.fixture(autouse=True)
def _one_tls_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the system's authorities takes longer than most of these tests."""
    monkeypatch.setattr(client, "tls_context", tls_context)


@pytest.fixture
async def server() -> AsyncIterator[MediaServer]:
    """On an address that `QUICK` allows, with an image at `/a.png`."""
    async with MediaServer(answers={"/a.png": answering(body=image_bytes(7))}).running() as running:
        yield running


@pytest.fixture
async def forbidden() -> AsyncIterator[MediaServer]:
    """What a request must never reach; the test fails if one does."""
    async with MediaServer(
        host=FORBIDDEN, answers={"/": answering(body=image_bytes(8))}
    ).running() as running:
        yield running
        assert running.num_connections == 0
