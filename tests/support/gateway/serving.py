"""Servers in a test's own event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import uvicorn

from tests.support.waiting import until

MODEL = "fake-vl"
DIGEST = "f" * 64


class QuietServer(uvicorn.Server):
    """uvicorn without signal handlers, for a test's own event loop."""

    @contextmanager
    def capture_signals(self) -> Any:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which would end the process, and every test after this one."""
        try:
            await super().startup(sockets)
        except SystemExit:
            raise OSError(f"cannot listen at {self.config.host}:{self.config.port}") from None


@asynccontextmanager
async def served(
    app: Any,
    port: int,
    host: str = "127.0.0.1",
    http: type[asyncio.Protocol] | Literal["auto"] = "auto",
) -> AsyncIterator[QuietServer]:
    server = QuietServer(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            http=http,
            lifespan="off",
            log_config=None,
            ws="none",
            timeout_graceful_shutdown=1,
        )
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(server.serve())
        await until(lambda: server.started)
        try:
            yield server
        finally:
            server.should_exit = True
            await asyncio.wait({task}, timeout=3)
