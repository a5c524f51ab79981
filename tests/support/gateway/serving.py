"""Servers in a test's own event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import uvicorn

from tests.support.waiting import until

GRACE_S = 1.0  # for connections, when a server is told to end


class QuietServer(uvicorn.Server):
    """uvicorn without signal handlers, for a test's own event loop. It ends as soon as it is told to."""

    def __init__(self, config: uvicorn.Config) -> None:
        self._stopping = asyncio.Event()
        super().__init__(config)

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    @contextmanager
    def capture_signals(self) -> Any:
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which looks ten times a second whether its connections are closed."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            await until(lambda: not self.server_state.connections and not self.server_state.tasks, GRACE_S)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()

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
        )
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(server.serve())
        await until(lambda: server.started)
        try:
            yield server
        finally:
            server.stop()
            await asyncio.wait({task}, timeout=3)
