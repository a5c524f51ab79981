"""Transfers of one gateway, everything around them faked."""

from collections.abc import AsyncIterator

import pytest

from tests.support.gateway.transfer_world import World, running


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running(World()) as opened:
        yield opened
