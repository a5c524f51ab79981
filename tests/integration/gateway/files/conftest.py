"""A gateway that keeps files, and what its tests share."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway.system import System, opened_system


@pytest.fixture
async def files(
    redis_url: str, tmp_path: Path, keys_file: Path, request: pytest.FixtureRequest
) -> AsyncIterator[System]:
    """Callers have keys (`KEYS`). Parametrise indirectly with a dict of settings to change."""
    settings: dict[str, Any] = {"files_dir": tmp_path / "files", "api_keys_file": keys_file}
    async with opened_system(redis_url, tmp_path, **settings | getattr(request, "param", {})) as opened:
        yield opened
