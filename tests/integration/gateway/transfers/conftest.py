"""A gateway between two hosts."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.gateway.hosts import Hosts, opened_hosts


@pytest.fixture
async def hosts(redis_url: str, tmp_path: Path) -> AsyncIterator[Hosts]:
    async with opened_hosts(redis_url, tmp_path) as opened:
        yield opened
