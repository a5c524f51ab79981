"""A store that dies while a client connects to it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults.resets import LIMIT_S, LOOPS, Asyncio, Uvloop, resetting_server
from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.store_session import AsyncStoreSession


@pytest.mark.parametrize("loop", LOOPS)
def test_it_is_unavailable(loop: type[Uvloop | Asyncio], tmp_path: Path) -> None:
    async def lose(transport: asyncio.Transport, protocol: Any) -> None:
        server.reset()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait([protocol._welcomed])  # which reports its loss
        assert transport.is_closing()

    async def connect() -> None:
        with pytest.raises(StoreUnavailableError, match="closed the session at hello"):
            await AsyncStoreSession.connect(path, "encoder-0/host")

    path = tmp_path / "store.sock"
    with resetting_server(answers=False, path=path) as server, asyncio.Runner(loop_factory=loop) as runner:
        runner.get_loop().on_connection = lose
        runner.run(connect())
