"""A gateway with one instance that prefills and one that decodes; the `prefill_decode` of others has left."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.gateway.fake_stages import FakeDecode, FakePrefill
from tests.support.gateway.system import System, opened_system
from tests.support.scraping import scrape


@dataclass
class Staged:
    """A `System` without its `prefill_decode`, unless a test starts one."""

    system: System
    prefill: FakePrefill
    decode: FakeDecode
    stack: AsyncExitStack

    async def another_prefill(self, **fields: object) -> FakePrefill:
        other = FakePrefill("p-1", **fields)
        self.decode.prefills.append(other)
        await self.stack.enter_async_context(other.running(self.system.bus))
        await self.system.refresh()
        return other

    async def another_decode(self, **fields: object) -> FakeDecode:
        other = FakeDecode("d-1", prefills=self.decode.prefills, **fields)
        await self.stack.enter_async_context(other.running(self.system.bus))
        await self.system.refresh()
        return other

    async def total(self, metric: str, **labels: str) -> float:
        """Of a metric of the gateway, as it is scraped."""
        now = await asyncio.to_thread(scrape, self.system.gateway.settings.port)
        return now.total(f"triptych_gateway_{metric}", **labels)


@pytest.fixture
async def staged(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Staged]:
    """Parametrise indirectly with a dict of settings to change."""
    changes = {"first_token_timeout_s": 5.0} | getattr(request, "param", {})
    async with opened_system(redis_url, tmp_path, **changes) as system, AsyncExitStack() as stack:
        await _leave(system)
        prefill = FakePrefill()
        decode = FakeDecode(prefills=[prefill])
        for each in (prefill, decode):
            await stack.enter_async_context(each.running(system.bus))
        await system.refresh()
        yield Staged(system, prefill, decode, stack)


async def _leave(system: System) -> None:
    """Its `prefill_decode` drains: it gets no request."""
    registration = system.prefill_decode.registration
    assert registration is not None
    await registration.announce_draining()
    await system.refresh()
