"""Metrics over HTTP, `GET /metrics` on a Unix socket or port, for services without an HTTP server."""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, Field
from pydantic_settings import SettingsConfigDict

from triptych_common.protocol.urls import HostText
from triptych_common.runtime.listening import ListenError, bind_tcp
from triptych_common.telemetry.metrics import CONTENT_TYPE

MAX_HEAD_BYTES = 8 << 10
TIMEOUT_S = 5.0
MAX_SCRAPES = 16


class MetricsSettings(BaseModel):
    """Mixin for a service's settings: it listens for Prometheus only where a socket or a port is set.

    Any client that reaches the listener may read all metrics.
    """

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    metrics_socket: Path | None = None
    """Unix socket, made with mode 0600, that serves metrics at `/metrics`. Not set: none."""
    metrics_host: HostText = "127.0.0.1"
    """Address that `metrics_port` listens on; any client that reaches it may read all metrics."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port that serves metrics at `/metrics`. Not set: none."""


def check_listener(settings: MetricsSettings) -> None:
    """Check before a slow start that the port is free. Raises ListenError: it cannot."""
    if settings.metrics_port is not None:
        for sock in _bound(settings.metrics_host, settings.metrics_port):
            sock.close()


class ScrapeServer:
    """Server that answers scrapes with what `render` returns; it listens from `serve` on, if set."""

    methods: tuple[bytes, ...] = (b"GET", b"HEAD")

    def __init__(self, render: Callable[[], bytes]) -> None:
        self._render = render
        self._servers: list[asyncio.Server] = []
        self._path: Path | None = None
        self._num_open = 0

    async def serve(self, settings: MetricsSettings) -> None:
        """Listen at `metrics_socket` (0600), and on `metrics_port` of `metrics_host`, where they are set.

        Raises:
            ListenError: the socket or the port cannot be opened.
        """
        path = settings.metrics_socket
        try:
            if path is not None:
                listener = _listen_at(path)
                self._path = path
                server = await asyncio.start_unix_server(self._answer, sock=listener, limit=MAX_HEAD_BYTES)
                self._servers.append(server)
            if settings.metrics_port is not None:
                for sock in _bound(settings.metrics_host, settings.metrics_port):
                    server = await asyncio.start_server(self._answer, sock=sock, limit=MAX_HEAD_BYTES)
                    self._servers.append(server)
        except OSError as error:
            raise ListenError(f"cannot serve metrics: {error.strerror or error}") from error

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for server in self._servers:
            with suppress(TimeoutError):
                await asyncio.wait_for(server.wait_closed(), TIMEOUT_S)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            if self._num_open <= MAX_SCRAPES:
                async with asyncio.timeout(TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._response(head))
                    await writer.drain()
        except TimeoutError:
            writer.transport.abort()  # a close would wait until the scraper has read the rest
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the scraper has gone, or sent no head: its scrape fails
        finally:
            self._num_open -= 1
            writer.close()

    async def _response(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        if method not in self.methods or rest.partition(b" ")[0].partition(b"?")[0] != b"/metrics":
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        return await self._scrape(method)

    async def _scrape(self, method: bytes) -> bytes:
        body = self._render()
        lines = f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        return lines.encode() + b"Connection: close\r\n\r\n" + (body if method == b"GET" else b"")


def _bound(host: str, port: int) -> list[socket.socket]:
    try:
        return bind_tcp(host, port)
    except ListenError as error:
        raise ListenError(f"cannot serve metrics: {error}") from error


def _listen_at(path: Path) -> socket.socket:
    """Listen at `path`, replacing a dead process's socket."""
    if path.is_socket():
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)
    try:
        listener.bind(str(path))
        return listener
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(old_mask)
