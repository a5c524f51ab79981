"""HTTP client for media: aiohttp sends requests, and this module checks addresses.

A socket is made for one address, and only for one that is allowed: whatever a name server, a redirect or a
literal said before, this is what will be connected to. Each request has a connection of its own, so none
finds by its time that another tenant has just been there. No cookies, no decompression, and no proxy that
the environment names.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
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
from aiohttp.abc import AbstractResolver, ResolveResult
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
from triptych_gateway.fetch.fetch_rules import AddressRules, address_refused
from triptych_gateway.settings import FetchSettings

NUM_THREADS = 16


class AddressRefusedError(OSError):
    """Connection to a forbidden address. An OSError, since aiohttp expects no other error there."""

    def __init__(self) -> None:
        super().__init__("the address is not allowed")


class SystemNames(AbstractResolver):
    """Resolver of the system; no lookup is cached.

    Lookups have threads of their own: a name server that does not answer holds a thread for as long as the
    system's resolver tries, and the event loop's are needed for the names of prefill_decodes.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._timeout_s):
            return await loop.run_in_executor(self._threads, _look_up, host, port, family)

    async def close(self) -> None:
        """Close without waiting for lookups that still run."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class CheckedNames(AbstractResolver):
    """Resolver that refuses a name with any forbidden address: chance may pick that one."""

    def __init__(self, names: AbstractResolver, rules: AddressRules) -> None:
        self._names = names
        self._rules = rules

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._names.resolve(host, port, family)
        if not all(self._rules.allows_text(each["host"]) for each in found):
            raise AddressRefusedError
        return found

    async def close(self) -> None:
        await self._names.close()


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    found = socket.getaddrinfo(
        host.encode("ascii"), port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
    )
    return [
        ResolveResult(
            hostname=host,
            host=str(address[0]),
            port=port,
            family=each_family,
            proto=protocol,
            flags=socket.AI_NUMERICHOST,
        )
        for each_family, _, protocol, _, address in found
    ]


TRANSPORT_ERRORS = (ClientError, HttpProcessingError, OSError, ValueError)
"""Errors of sending a request and reading its answer; `failure_of` translates them."""

HEADERS = {"User-Agent": "Triptych", "Accept": "*/*", "Accept-Encoding": "identity"}
MAX_HEADERS = 100
READ_AHEAD_BYTES = 64 << 10
_NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


@asynccontextmanager
async def open_client(
    settings: FetchSettings, names: AbstractResolver | None = None
) -> AsyncIterator[ClientSession]:
    """Open the client of one gateway, with `names` instead of the system's resolver.

    With a proxy all connections go to it; it looks up names, and its own address is not checked.
    """
    rules = AddressRules(settings.fetch_allowed_networks)
    names = SystemNames(settings.fetch_connect_timeout_s) if names is None else names
    connector = TCPConnector(
        limit=0,
        force_close=True,
        use_dns_cache=False,
        ssl=tls_context(settings.fetch_ca_file),
        resolver=CheckedNames(names, rules) if settings.fetch_proxy is None else names,
        socket_factory=partial(checked_socket, rules) if settings.fetch_proxy is None else None,
    )
    try:
        async with ClientSession(
            connector=connector,
            timeout=ClientTimeout(
                total=None,
                sock_connect=settings.fetch_connect_timeout_s,
                sock_read=settings.fetch_chunk_timeout_s,
            ),
            headers=HEADERS,
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=READ_AHEAD_BYTES,
            max_line_size=settings.fetch_max_header_bytes,
            max_field_size=settings.fetch_max_header_bytes,
            max_headers=MAX_HEADERS,
        ) as client:
            client._retry_connection = False  # noqa: SLF001 - attempts are counted by `SharedDownloads` alone
            yield client
    finally:
        await names.close()


def checked_socket(rules: AddressRules, info: AddrInfoType) -> socket.socket:
    """Make a socket for the one address of `info`. Raises AddressRefusedError: it is not allowed."""
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
