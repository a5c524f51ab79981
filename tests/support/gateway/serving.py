"""Servers, ports and waits of a test's own event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import uvicorn

from triptych_cli.system.machine import free_ports

MODEL = "fake-vl"
DIGEST = "f" * 64


async def until(condition: Callable[[], object], limit_s: float = 5.0) -> None:
    """Return once `condition` holds; for what a test can only observe."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def until_async(condition: Callable[[], Awaitable[object]], limit_s: float = 5.0) -> None:
    """Return once `condition()` gives something true; for what a test can only ask."""
    async with asyncio.timeout(limit_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def free_port() -> int:
    return free_ports(1)[0]


class QuietServer(uvicorn.Server):
    """uvicorn without signal handlers, for a test's own event loop."""

    @contextmanager
    def capture_signals(self) -> Any:
        yield


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
