"""Relay of the store's metrics to a port, for a store without network (the command `relay`).

    Prometheus --HTTP--> relay, which has a network --Unix socket--> store, which has none

A process of its own. It takes nothing from the network but the scrape, and asks the store's socket for it.
"""

import asyncio
from pathlib import Path

from triptych_cache_store.settings import StoreSettings
from triptych_common.runtime import MetricsSettings, StopSignal
from triptych_common.runtime.listening import ListenError
from triptych_common.runtime.scrape_server import ScrapeServer
from triptych_common.telemetry.logs import get_logger

SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: cache_store\r\nConnection: close\r\n\r\n"
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

log = get_logger(__name__)


async def run_relay(settings: StoreSettings, stop: StopSignal) -> None:
    """Relay scrapes of `metrics_port` to `metrics_socket` until `stop`.

    Raises:
        ListenError: one of the two is not set, or the port cannot be listened on.
    """
    if settings.metrics_socket is None or settings.metrics_port is None:
        raise ListenError("the relay needs both metrics_socket and metrics_port")
    relay = ScrapeRelay(settings.metrics_socket)
    await relay.serve(MetricsSettings(metrics_host=settings.metrics_host, metrics_port=settings.metrics_port))
    try:
        log.info("relay is up", port=settings.metrics_port)
        await stop.wait()
    finally:
        await relay.close()


class ScrapeRelay(ScrapeServer):
    """Answers `GET /metrics` with the store's answer at its socket; 503 if no store answers."""

    methods = (b"GET",)

    def __init__(self, store: Path) -> None:
        super().__init__(bytes)
        self._store = store

    async def _scrape(self, method: bytes) -> bytes:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._store))
        except OSError:  # the store is down, or has not started yet
            return UNAVAILABLE
        try:
            writer.write(SCRAPE)
            return await reader.read() or UNAVAILABLE
        finally:
            writer.close()
