"""Connections that their peer resets, at a moment that the kernel rarely picks by itself."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from tests.support.faults.tcp_proxy import RESET_ON_CLOSE

_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
LIMIT_S = 60.0


class _Connects:
    """A loop that shows every new connection to `on_connection`, before its client gets it."""

    on_connection: Callable[[asyncio.Transport, Any], Any]

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        transport, protocol = await super().create_connection(*args, **options)  # type: ignore[misc]
        await self.on_connection(transport, protocol)
        return transport, protocol

    async def create_unix_connection(self, *args: Any, **options: Any) -> Any:
        transport, protocol = await super().create_unix_connection(*args, **options)  # type: ignore[misc]
        await self.on_connection(transport, protocol)
        return transport, protocol


class Uvloop(_Connects, uvloop.Loop): ...  # type: ignore[misc]


class Asyncio(_Connects, asyncio.SelectorEventLoop): ...


LOOPS = (Uvloop, Asyncio)  # what services run on, and what they run on where there is no uvloop


def show_connections(runner: asyncio.Runner, to: Callable[[asyncio.Transport, Any], Any]) -> None:
    """Call `to` with every new connection of the runner's loop, which is one of `LOOPS`."""
    loop = runner.get_loop()
    assert isinstance(loop, _Connects)
    loop.on_connection = to


async def wait_reset(transport: asyncio.Transport, protocol: Any) -> None:
    """Return when the loop has seen the reset and has let the socket go. Reading must not be paused.

    `protocol` is anyio's. The socket itself is not asked for: uvloop keeps an object for it from then on.
    """
    async with asyncio.timeout(LIMIT_S):
        await protocol.read_event.wait()
    assert transport.is_closing()


class ResettingServer:
    """One that resets each connection when `reset` is called; before that it `answers` a request, or none."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._may_reset = threading.Event()

    def reset(self) -> None:
        self._may_reset.set()

    def serve(self, listener: socket.socket, *, answers: bool) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                if answers:
                    connection.recv(65536)
                    connection.sendall(_ANSWER)
                self._may_reset.wait(LIMIT_S)


@contextmanager
def resetting_server(*, answers: bool, path: Path | None = None) -> Iterator[ResettingServer]:
    """At a port of its own, or at the Unix socket `path`."""
    with socket.socket(socket.AF_INET if path is None else socket.AF_UNIX) as listener:
        listener.bind(("127.0.0.1", 0) if path is None else str(path))
        listener.listen()
        server = ResettingServer(f"unix://{path}" if path else "http://{}:{}".format(*listener.getsockname()))
        thread = threading.Thread(
            target=server.serve, args=(listener,), kwargs={"answers": answers}, name="resets", daemon=True
        )
        thread.start()
        try:
            yield server
        finally:
            server.reset()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(LIMIT_S)
