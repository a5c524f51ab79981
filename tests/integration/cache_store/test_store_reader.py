"""What a gateway reads of the store for the page at `/ui`: nothing of it stays when nobody looks."""

import asyncio
import signal
from pathlib import Path

from tests.support.stores import StoreProcess
from triptych_gateway.ui.system_view import StoreReader


async def test_the_store_is_read_while_somebody_looks(daemon: StoreProcess) -> None:
    reader = StoreReader(daemon.socket, "gateway-0/ui")
    async with reader.hold():
        stats = await reader.read()
        async with reader.hold():
            again = await reader.read()
        assert stats is not None
        assert again is not None
        assert stats.region_num_bytes > 0
        assert (stats.num_sessions, again.num_sessions) == (1, 1)  # one session, however many look
        assert reader._session is not None
    assert reader._session is None


async def test_a_store_that_goes_and_comes_back(daemon: StoreProcess) -> None:
    reader = StoreReader(daemon.socket, "gateway-0/ui")
    async with asyncio.timeout(30), reader.hold():
        assert await reader.read() is not None
        daemon.stop(signal.SIGKILL)
        assert await reader.read() is None
        daemon.start()
        assert await reader.read() is not None


async def test_no_store_here(tmp_path: Path) -> None:
    reader = StoreReader(tmp_path / "store.sock", "gateway-0/ui")
    async with reader.hold():
        assert await reader.read() is None
