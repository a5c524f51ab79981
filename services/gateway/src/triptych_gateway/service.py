"""Run the gateway: uvicorn in this process until a stop, then a bounded drain.

`DrainGate` has the states. While it is leaving, `/health/ready` answers 503, and requests are still served,
each answer with `Connection: close`. The listener goes on until the last request has ended: encoders fetch
its media there.
"""

import asyncio
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus

import httpx
import uvicorn

from triptych_common.runtime import DrainGate, StopSignal, bind_tcp
from triptych_common.runtime.healthcheck import HEALTHY, NO_ANSWER, NOT_READY
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.app import create_app
from triptych_gateway.endpoints.table import chat_form_of, serves_callers
from triptych_gateway.errors import error_body
from triptych_gateway.gateway import Gateway, run_gateway
from triptych_gateway.listeners import callers_config, check_tls_files, internal_config
from triptych_gateway.open_files import allow_open_files
from triptych_gateway.settings import GatewaySettings

log = get_logger(__name__)

HEALTH_TIMEOUT_S = 3.0


class _Server(uvicorn.Server):
    """Server of uvicorn without its signal handlers: `run_service` has them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(settings: GatewaySettings, stop: StopSignal) -> None:
    """Serve until `stop`, then finish what is running within `drain_timeout_s`."""
    check_tls_files(settings)
    limits = allow_open_files(settings.max_requests_in_flight, settings.max_idle_connections)
    sockets = [bind_tcp(host, port) for host, port in settings.addresses]
    async with run_gateway(settings) as gateway:
        gate = DrainGate(
            create_app(gateway), serves_callers, lambda path, error: error_body(error, chat_form_of(path))
        )
        servers = [_Server(callers_config(gate, settings, limits))]
        if settings.internal_port is not None:
            servers.append(_Server(internal_config(gate, settings)))
        async with asyncio.TaskGroup() as group:
            stopper = group.create_task(_end_on_stop(gateway, gate, servers, stop))
            gc.freeze()  # objects of the start stay: a collection need not visit them while requests wait
            log.info("gateway serves", host=settings.host, port=settings.port, tls=settings.has_tls)
            serving = [
                group.create_task(server.serve(sockets=bound))
                for server, bound in zip(servers, sockets, strict=True)
            ]
            await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
            stopper.cancel()
            _end(servers)
    log.info("gateway ended")


async def _end_on_stop(
    gateway: Gateway, gate: DrainGate, servers: Sequence[uvicorn.Server], stop: StopSignal
) -> None:
    await stop.wait()
    settings = gateway.settings
    gate.leave()
    try:
        async with asyncio.timeout(settings.drain_timeout_s):
            await gateway.registration.announce_draining()
            log.info("draining", num_requests=gate.num_requests)
            await asyncio.sleep(settings.drain_grace_s)  # until balancers have asked
            gate.refuse()
            await gate.wait_idle()
    except TimeoutError:
        log.warning("requests are cut off: not finished in time", num_requests=gate.num_requests)
        gateway.chat.cut_off.set()
    _end(servers)


def _end(servers: Sequence[uvicorn.Server]) -> None:
    for server in servers:
        server.should_exit = True


def health_code(settings: GatewaySettings) -> int:
    """Return the exit code of this gateway's health check (`runtime.healthcheck`)."""
    return min(map(_health_code, settings.local_urls))


def _health_code(url: str) -> int:
    try:
        answer = httpx.get(f"{url}/health/ready", timeout=HEALTH_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError:
        return NO_ANSWER
    return HEALTHY if answer.status_code == HTTPStatus.OK else NOT_READY
