"""Clients in front of a gateway."""

from collections.abc import AsyncIterator

import anthropic
import pytest

from tests.support.gateway.messages_client import client_of
from tests.support.gateway.system import System


@pytest.fixture
async def claude(system: System) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with client_of(system) as client:
        yield client
