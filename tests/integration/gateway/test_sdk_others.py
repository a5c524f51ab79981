"""LangChain's and LiteLLM's clients against the gateway, with a stand-in for the engine."""

import asyncio
from pathlib import Path

import pytest

from tests.support.gateway.clients.running import PACKAGES, install, is_installed, run_client
from tests.support.gateway.samples import MODEL, data_url, entry, image_bytes, write_keys
from tests.support.gateway.system import opened_system

WORDS = "word0 word1 word2"


@pytest.mark.long  # the packages are large: a minute for their installation, where they are not there
@pytest.mark.parametrize("script", PACKAGES)
async def test_another_client(redis_url: str, tmp_path: Path, script: str) -> None:
    folder = None if is_installed(script) else tmp_path / "packages"
    if folder is not None:
        await asyncio.to_thread(install, script, folder)
    keys = write_keys(tmp_path / "keys.toml", entry("any", "key"))
    async with opened_system(redis_url, tmp_path, api_keys_file=keys) as system:
        base_url = str(system.openai.base_url)
        picture = data_url(image_bytes(7))
        got = await asyncio.to_thread(run_client, script, folder, base_url, "key", MODEL, picture)
        image = got.pop("image")
        assert image.endswith(WORDS)
        assert image != WORDS, "the stand-in shows the item's grid"
        streamed = got.pop("streamed"), got["asynchronous"].pop()
        assert [text.split() for text in streamed] == [WORDS.split()] * 2
        assert got == {
            "whole": WORDS,
            "tells_usage": True,
            "asynchronous": [WORDS],
            "several": [WORDS, WORDS],
            "unknown_model": "NotFoundError",
            "bad_field": "BadRequestError",
            "no_key": "AuthenticationError",
        }
