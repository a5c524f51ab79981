"""Run the gateway: uvicorn in this process until a stop, then a bounded drain.

Where there is no internal port, the callers' serves all. Where there is one, neither serves what is the
other's: the internal port knows no TLS and no proxies, and is not to be reached by callers.

`DrainGate` has the states. While it is leaving, `/health/ready` answers 503, and requests are still served,
each answer with `Connection: close`. The listener goes on until the last request has ended: encoders fetch
its media there.
"""

import asyncio
import gc
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from ipaddress import IPv4Network

import httpx
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych_common.domain.errors import RequestError, TriptychError
from triptych_common.runtime import DrainGate, StopSignal, bind_tcp
from triptych_common.runtime.healthcheck import HEALTHY, NO_ANSWER, NOT_READY
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.app import create_app
from triptych_gateway.encode.media_cache import MEDIA_PATH
from triptych_gateway.endpoints.local_endpoints import METRICS
from triptych_gateway.endpoints.table import ENDPOINTS, chat_form_of, serves_callers
from triptych_gateway.errors import error_body, error_response
from triptych_gateway.gateway import Gateway, run_gateway
from triptych_gateway.handshakes import TlsListener
from triptych_gateway.http_protocol import BoundedHttpProtocol, bounded_protocol
from triptych_gateway.open_files import ConnectionLimits, allow_open_files
from triptych_gateway.settings import GatewaySettings

log = get_logger(__name__)

KEEPALIVE_S = 75
CUT_OFF_S = 1  # for the ends of answers that are cut off, and for connections to close
_STATUS_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if not endpoint.needs_key)
_MAPPED_BITS = 96  # of an IPv4 address as a socket for both shows it
HEALTH_TIMEOUT_S = 3.0


class TlsFilesError(TriptychError):
    """A certificate, its key or the list of authorities cannot be used."""


class ServedPaths:
    """ASGI application that serves a part of `app`'s paths: the internal ones, or all others."""

    def __init__(self, app: ASGIApp, *, internal: bool) -> None:
        self._app = app
        self._internal = internal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._serves(scope["path"]):
            await self._app(scope, receive, send)
        else:
            error = RequestError(404, "not_found", "no such path")
            await error_response(error)(scope, receive, send)

    def _serves(self, path: str) -> bool:
        is_media = path.startswith(f"{MEDIA_PATH}/")
        if self._internal:
            return is_media or path in _STATUS_PATHS
        return not is_media and path != METRICS.path


def check_tls_files(settings: GatewaySettings) -> None:
    """Check the TLS files before anything is started.

    Raises:
        TlsFilesError: callers cannot be served by HTTPS.
    """
    if settings.tls_cert_file is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
        if settings.tls_client_ca_file is not None:
            context.load_verify_locations(settings.tls_client_ca_file)
    except OSError as error:  # OpenSSL's errors too
        raise TlsFilesError(f"the TLS files cannot be used: {error.strerror or error}") from error


def callers_config(app: ASGIApp, settings: GatewaySettings, limits: ConnectionLimits) -> uvicorn.Config:
    config = _config(
        app if settings.internal_port is None else ServedPaths(app, internal=False),
        bounded_protocol(settings, limits.max_idle),
        proxies=_proxies(settings),
    )
    config.backlog = limits.backlog
    if settings.tls_cert_file is not None:
        config.ssl_certfile = settings.tls_cert_file
        config.ssl_keyfile = settings.tls_key_file
        if settings.tls_client_ca_file is not None:
            config.ssl_ca_certs = str(settings.tls_client_ca_file)
            config.ssl_cert_reqs = ssl.CERT_REQUIRED
    return config


def internal_config(app: ASGIApp, settings: GatewaySettings) -> uvicorn.Config:
    """Return the configuration of the server for encoders, health checks and scrapes."""
    return _config(ServedPaths(app, internal=True), bounded_protocol(settings), proxies=[])


def _config(app: ASGIApp, protocol: type[BoundedHttpProtocol], *, proxies: list[str]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # its warnings are of each request that is no HTTP: too many
        access_log=False,
        server_header=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=proxies,
        timeout_keep_alive=KEEPALIVE_S,
        timeout_graceful_shutdown=CUT_OFF_S,
    )


def _proxies(settings: GatewaySettings) -> list[str]:
    """Return the proxies' networks; IPv4 ones in both forms, since a socket for both shows the longer."""
    networks = settings.forwarded_allow_ips
    mapped = [
        f"::ffff:{each.network_address}/{_MAPPED_BITS + each.prefixlen}"
        for each in networks
        if isinstance(each, IPv4Network)
    ]
    return [*map(str, networks), *mapped]


class _Server(uvicorn.Server):
    """Server of uvicorn without its signal handlers: `run_service` has them."""

    def __init__(self, config: uvicorn.Config, settings: GatewaySettings, max_waiting: int) -> None:
        super().__init__(config)
        self._settings, self._max_waiting = settings, max_waiting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with bounds on TLS handshakes, which uvicorn and asyncio do not have."""
        if self.config.ssl is None:
            await super().startup(sockets)
            return
        await super().startup(sockets=[])
        self.servers += [  # uvicorn closes them, and asks nothing else of them
            TlsListener(  # type: ignore[misc]
                each,
                self._make_protocol,
                self.config.ssl,
                timeout_s=self._settings.header_timeout_s,
                max_per_s=self._settings.max_tls_handshakes_per_s,
                max_waiting=self._max_waiting,
                backlog=self.config.backlog,
            )
            for each in sockets or ()
        ]

    def _make_protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn calls it
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

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
        servers = [_Server(callers_config(gate, settings, limits), settings, limits.max_idle)]
        if settings.internal_port is not None:
            servers.append(_Server(internal_config(gate, settings), settings, limits.max_idle))
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
        gateway.services.cut_off.set()
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
