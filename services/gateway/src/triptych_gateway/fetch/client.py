"""HTTP client for media: aiohttp sends requests, and this module checks addresses.

A socket is made for one address, and only for one that is allowed: whatever a name server, a redirect or a
literal said before, this is what will be connected to. Each request has a connection of its own, so none
finds by its time that another tenant has just been there. No cookies, no decompression, and no proxy that
the environment names.
"""

import errno
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import certifi
from aiohttp import (
    AddrInfoType,
    ClientConnectorCertificateError,
    ClientConnectorDNSError,
    ClientConnectorError,
    ClientConnectorSSLError,
    ClientError,
    ClientHttpProxyError,
    ClientPayloadError,
    ClientResponseError,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    InvalidURL,
    TCPConnector,
)
from aiohttp.abc import AbstractResolver
from aiohttp.http_exceptions import HttpProcessingError

from triptych_common.domain.errors import TriptychError
from triptych_gateway.fetch.failures import (
    FetchError,
    MalformedUrlError,
    NoResourcesError,
    ServerFailedError,
    ServerRefusedError,
    ServerStalledError,
)
from triptych_gateway.fetch.names import AddressRefusedError, CheckedNames, SystemNames
from triptych_gateway.fetch.options import FetchOptions
from triptych_gateway.fetch.rules.addresses import AddressRules
from triptych_gateway.fetch.rules.urls import address_refused

TRANSPORT_ERRORS = (ClientError, HttpProcessingError, OSError, ValueError)
"""Errors of sending a request and reading its answer; `failure_of` translates them."""

HEADERS = {"User-Agent": "Triptych", "Accept": "*/*", "Accept-Encoding": "identity"}
MAX_HEADERS = 100
READ_AHEAD_BYTES = 64 << 10
_NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


@asynccontextmanager
async def open_client(
    options: FetchOptions, names: AbstractResolver | None = None
) -> AsyncIterator[ClientSession]:
    """Open the client of one gateway, with `names` instead of the system's resolver.

    With a proxy all connections go to it; it looks up names, and its own address is not checked.
    """
    rules = AddressRules(options.allowed_networks)
    names = SystemNames(options.connect_timeout_s) if names is None else names
    connector = TCPConnector(
        limit=0,
        force_close=True,
        use_dns_cache=False,
        ssl=tls_context(options.ca_file),
        resolver=CheckedNames(names, rules) if options.proxy is None else names,
        socket_factory=partial(checked_socket, rules) if options.proxy is None else None,
    )
    try:
        async with ClientSession(
            connector=connector,
            timeout=ClientTimeout(
                total=None, sock_connect=options.connect_timeout_s, sock_read=options.chunk_timeout_s
            ),
            headers=HEADERS,
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=READ_AHEAD_BYTES,
            max_line_size=options.max_header_bytes,
            max_field_size=options.max_header_bytes,
            max_headers=MAX_HEADERS,
        ) as client:
            client._retry_connection = False  # noqa: SLF001 - attempts are counted by `RetryPolicy` alone
            yield client
    finally:
        await names.close()


def checked_socket(rules: AddressRules, info: AddrInfoType) -> socket.socket:
    """Make a socket for the one address of `info`.

    Raises:
        AddressRefusedError: it is not allowed.
    """
    family, kind, protocol, _, address = info
    if not rules.allows_text(str(address[0])):
        raise AddressRefusedError
    return socket.socket(family, kind, protocol)


def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """Make a context that checks certificates and names, by the system's or certifi's authorities and
    `ca_file`.

    Raises:
        TriptychError: `ca_file` cannot be used.
    """
    context = ssl.create_default_context()
    context.set_alpn_protocols(("http/1.1",))
    if not _has_authorities():
        context.load_verify_locations(certifi.where())
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except OSError as error:  # SSLError is one
            raise TriptychError(f"the file of authorities {ca_file} cannot be used: {error}") from error
    return context


def _has_authorities() -> bool:
    """Return whether the system has a file of authorities, or a folder that is not empty."""
    system = ssl.get_default_verify_paths()
    return bool(system.cafile) or bool(system.capath and any(Path(system.capath).iterdir()))


def failure_of(error: BaseException) -> FetchError:
    """Return the caller's error for a transport's error."""
    cause = getattr(error, "os_error", error)
    if isinstance(cause, AddressRefusedError):
        return address_refused()
    if isinstance(error, OSError) and error.errno in _NO_RESOURCES:
        return NoResourcesError("the gateway has no free connection just now")
    match error:
        case ClientConnectorDNSError() if getattr(cause, "errno", None) == socket.EAI_AGAIN:
            return ServerFailedError("its host name cannot be looked up just now")
        case ClientConnectorDNSError():
            return ServerRefusedError("its host name is not known")
        case ClientConnectorCertificateError():
            return ServerRefusedError("its server's certificate is not trusted")
        case ClientConnectorSSLError():
            return ServerRefusedError("its server offers no TLS that can be used")
        case InvalidURL():
            return MalformedUrlError("it cannot be asked for")
        case TimeoutError():
            return ServerStalledError("its server did not answer in time")
        case ClientHttpProxyError() | ClientPayloadError():
            return ServerFailedError("the transfer broke off")
        case ClientConnectorError():
            return ServerFailedError("its server cannot be reached")
        case ClientResponseError() | HttpProcessingError():
            return ServerRefusedError("its server sent no valid HTTP")
        case OSError() | ClientError():
            return ServerFailedError("the connection broke off")
        case _:
            return ServerRefusedError("it cannot be asked for")
