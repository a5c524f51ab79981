"""Relay of the store's metrics to a port, for a store without network (the command `relay`).

    Prometheus --HTTP--> relay, which has a network --Unix socket--> store, which has none

A process of its own. It takes nothing from the network but the scrape, and asks the store's socket for it.
"""

import asyncio
from http import HTTPStatus
from pathlib import Path

from triptych_cache_store.settings import StoreSettings
from triptych_common.runtime import StopSignal
from triptych_common.runtime.listening import ListenError, bind_tcp
from triptych_common.telemetry.logs import get_logger

MAX_HEAD_BYTES = 8 << 10
TIMEOUT_S = 5.0
MAX_SCRAPES = 16
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: cache_store\r\nConnection: close\r\n\r\n"

log = get_logger(__name__)


async def run_relay(settings: StoreSettings, stop: StopSignal) -> None:
    """Relay scrapes of `metrics_port` to `metrics_socket` until `stop`.

    Raises:
        ListenError: one of the two is not set, or the port cannot be listened on.
    """
    if settings.metrics_socket is None or settings.metrics_port is None:
        raise ListenError("the relay needs both metrics_socket and metrics_port")
    relay = ScrapeRelay(settings.metrics_socket)
    await relay.serve(settings.metrics_host, settings.metrics_port)
    try:
        log.info("relay is up", port=settings.metrics_port)
        await stop.wait()
    finally:
        await relay.close()


class ScrapeRelay:
    """Answers `GET /metrics` with the store's answer at its socket; 503 if no store answers."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._servers: list[asyncio.Server] = []
        self._num_open = 0

    async def serve(self, host: str, port: int) -> None:
        """Listen for scrapes on `host` and `port`. Raises ListenError: it cannot."""
        for sock in bind_tcp(host, port):
            self._servers.append(await asyncio.start_server(self._relay, sock=sock, limit=MAX_HEAD_BYTES))

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for server in self._servers:
            await server.wait_closed()  # answers are bounded by TIMEOUT_S

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            if self._num_open <= MAX_SCRAPES:
                async with asyncio.timeout(TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._answer(head))
                    await writer.drain()
        except TimeoutError:
            writer.transport.abort()  # a close would wait until the scraper has read the rest
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the scraper has gone, or sent no head: its scrape fails
        finally:
            self._num_open -= 1
            writer.close()

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        if method != b"GET" or rest.partition(b" ")[0].partition(b"?")[0] != b"/metrics":
            return _status(HTTPStatus.NOT_FOUND)
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._store))
        except OSError:  # the store is down, or has not started yet
            return _status(HTTPStatus.SERVICE_UNAVAILABLE)
        try:
            writer.write(SCRAPE)
            return await reader.read() or _status(HTTPStatus.SERVICE_UNAVAILABLE)
        finally:
            writer.close()


def _status(status: HTTPStatus) -> bytes:
    line = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    return line.encode()
