"""HTTP clients of services: every failure of a connection is an `httpx.HTTPError`, on uvloop too.

On uvloop a connection that its peer has reset has no socket any more. httpcore asks each new connection, and
each idle one, about its socket, and anyio then asks the socket that is not there: a server that dies while it
is connected to would be an AttributeError.
"""

from typing import Any

import httpcore
import httpx


def new_http_client(timeout: httpx.Timeout, limits: httpx.Limits) -> httpx.AsyncClient:
    """Return a client without proxies and redirects. Its pool belongs to one event loop."""
    return httpx.AsyncClient(
        timeout=timeout, transport=_Transport(limits), trust_env=False, follow_redirects=False
    )


class _Transport(httpx.AsyncHTTPTransport):
    """Transport of httpx with connections made by `_Backend`."""

    def __init__(self, limits: httpx.Limits) -> None:
        ssl_context = httpx.create_ssl_context(trust_env=False)
        super().__init__(verify=ssl_context, limits=limits)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=_Backend(),
        )


class _Backend(httpcore.AnyIOBackend):
    async def connect_tcp(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        return _Stream(await super().connect_tcp(*args, **options))


class _Stream(httpcore.AsyncNetworkStream):
    """Stream that wraps another one, which may be reset at any time."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await self._stream.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        return _Stream(await self._stream.start_tls(*args, **options))

    def get_extra_info(self, info: str) -> Any:
        """Return the stream's info; for a stream without a socket, report only that it is readable.

        The pool then drops an idle connection, and the first read of a new one raises its error.
        """
        try:
            return self._stream.get_extra_info(info)
        except (AttributeError, ValueError):  # the socket is None, or has no descriptor any more
            return True if info == "is_readable" else None
