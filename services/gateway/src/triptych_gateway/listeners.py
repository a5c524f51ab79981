"""Listeners: paths and options of the callers' port, perhaps with TLS, and of the internal port.

Where there is no internal port, the callers' serves all. Where there is one, neither serves what is the
other's: the internal port knows no TLS and no proxies, and is not to be reached by callers.
"""

import ssl
from ipaddress import IPv4Network

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych_common.domain.errors import RequestError, TriptychError
from triptych_gateway.encode.media_cache import MEDIA_PATH
from triptych_gateway.endpoints.local_endpoints import METRICS
from triptych_gateway.endpoints.table import ENDPOINTS
from triptych_gateway.errors import error_response
from triptych_gateway.http_protocol import BoundedHttpProtocol, bounded_protocol
from triptych_gateway.open_files import ConnectionLimits
from triptych_gateway.settings import GatewaySettings

KEEPALIVE_S = 75
CUT_OFF_S = 1  # for the ends of answers that are cut off, and for connections to close
_STATUS_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if not endpoint.needs_key)
_MAPPED_BITS = 96  # of an IPv4 address as a socket for both shows it


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


def protocol_of(settings: GatewaySettings, max_idle: int | None = None) -> type[BoundedHttpProtocol]:
    """Return the protocol class with the bounds of `settings`; `max_idle` None is no bound."""
    return bounded_protocol(
        settings.max_header_bytes, settings.header_timeout_s, settings.chunk_timeout_s, max_idle
    )


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
    """Return the configuration of the server for callers."""
    config = _config(
        app if settings.internal_port is None else ServedPaths(app, internal=False),
        settings,
        protocol_of(settings, limits.max_idle),
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
    return _config(ServedPaths(app, internal=True), settings, protocol_of(settings), proxies=[])


def _config(
    app: ASGIApp, settings: GatewaySettings, protocol: type[BoundedHttpProtocol], *, proxies: list[str]
) -> uvicorn.Config:
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
