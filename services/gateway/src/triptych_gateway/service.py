"""Run the gateway: uvicorn in this process, until asked to stop; then drain within a bound."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import httpx
import uvicorn

from triptych_common.runtime import StopSignal
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.app import create_app
from triptych_gateway.gateway import Gateway, run_gateway
from triptych_gateway.settings import GatewaySettings

log = get_logger(__name__)

KEEPALIVE_S = 75
HEALTH_TIMEOUT_S = 3.0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: `run_service` has them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(settings: GatewaySettings, stop: StopSignal) -> None:
    """Serve until `stop`, then finish what is running within `drain_timeout_s`."""
    async with run_gateway(settings) as gateway:
        server = _Server(_config(gateway))
        async with asyncio.TaskGroup() as group:
            stopper = group.create_task(_end_on_stop(gateway, server, stop))
            log.info("gateway serves", host=settings.host, port=settings.port)
            await server.serve()
            stopper.cancel()
    log.info("gateway ended")


async def _end_on_stop(gateway: Gateway, server: uvicorn.Server, stop: StopSignal) -> None:
    await stop.wait()
    gateway.is_draining = True
    server.should_exit = True


def _config(gateway: Gateway) -> uvicorn.Config:
    settings = gateway.settings
    return uvicorn.Config(
        create_app(gateway),
        host=settings.host,
        port=settings.port,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEPALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
    )


def is_healthy(settings: GatewaySettings) -> bool:
    """Whether the gateway of these settings is ready to serve."""
    try:
        answer = httpx.get(f"{settings.local_url}/health/ready", timeout=HEALTH_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == HTTPStatus.OK
