"""FAKE: an instance that ends as soon as it has a request, as a killed process does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry


@dataclass
class DyingInstance(FakePrefillDecode):
    """Its connection and its port are gone at the first request. `beginning`: what it sends before."""

    beginning: bytes = b""
    num_requests: int = 0

    @asynccontextmanager
    async def running(self, bus: AsyncBus) -> AsyncIterator["FakePrefillDecode"]:
        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):  # a connection without a request
                writer.close()
                return
            self.num_requests += 1
            listener.close()
            writer.write(self.beginning)
            writer.close()

        listener = await asyncio.start_server(take, self.host, self.port)
        async with listener, Registry(bus).keep_registered(self.record()) as self.registration:
            yield self
