"""A system whose prefill_decode stores responses."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.system import System, opened_system


@pytest.fixture
async def storing(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[System]:
    """Parametrise indirectly with a dict of settings to change."""
    fake = FakePrefillDecode(stores_responses=True)
    changes = {"files_dir": tmp_path / "files"} | getattr(request, "param", {})
    async with opened_system(redis_url, tmp_path, fake, **changes) as opened:
        yield opened
