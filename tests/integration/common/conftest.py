"""A bus on the session's Redis, and its flights."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis

from triptych_common.bus import AsyncBus
from triptych_common.coordination import SingleFlight


@pytest.fixture
async def bus(redis_url: str) -> AsyncIterator[AsyncBus]:
    async with await AsyncBus.connect(redis_url, "test", client_name="tests") as connected:
        yield connected


@pytest.fixture
async def flights(bus: AsyncBus) -> SingleFlight:
    return SingleFlight(bus)


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    """A client of the session's Redis."""
    with redis.Redis.from_url(redis_url) as client:
        yield client
