"""The HTTP client for prefill_decode: one write per request, connections kept in a table per instance.

No redirects, no cookies, no proxies, no decompression. Of an answer that is not read no more than twice
`READ_AHEAD_BYTES` are taken in; a connection that is given up is aborted, with whatever it has not sent.
"""

import socket
from collections.abc import Mapping
from functools import partial
from typing import cast

from aiohttp import (
    AddrInfoType,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
)
from aiohttp.client_proto import ResponseHandler
from aiohttp.helpers import _EXC_SENTINEL as _NONE
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

KEEPALIVE_S = 2.0  # below the server's own, so that an idle connection is not used as it closes
READ_AHEAD_BYTES = 64 << 10
MAX_HEADER_BYTES = 16 << 10  # of an answer, for each line
# What sending a request and reading its answer may raise; the last two where the URL is none.
UPSTREAM_ERRORS = (ClientError, HttpProcessingError, OSError, ValueError)
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


def new_client(connect_timeout_s: float, write_timeout_s: float) -> ClientSession:
    """One per gateway. `RequestLimiter` bounds the connections; deadlines bound the first chunk.

    Args:
        connect_timeout_s: for the name and the connection.
        write_timeout_s: an instance that takes nothing of a request for so long is given up.
    """
    return ClientSession(
        connector=_Connector(write_timeout_s),
        timeout=ClientTimeout(total=None, connect=connect_timeout_s),
        cookie_jar=DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept"),
        auto_decompress=False,
        trust_env=False,
        read_bufsize=READ_AHEAD_BYTES,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
    )


async def open_response(
    client: ClientSession,
    url: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    method: str = "POST",
) -> ClientResponse:
    """Send `body` and return the answer once its headers are there. Close it in the end.

    `body` is JSON unless `headers` say otherwise, or empty.

    A request that has begun is never sent again.

    Raises:
        UPSTREAM_ERRORS: it could not be sent, or what came is no answer. Reading the answer raises them too.
    """
    return await client.request(
        method,
        URL(url, encoded=True),
        data=body or None,
        headers={**_HEADERS, **(headers or {})},
        allow_redirects=False,
    )


class _Connector(TCPConnector):
    """Names are looked up at each connection: an instance that restarts may have another address."""

    def __init__(self, write_timeout_s: float) -> None:
        super().__init__(
            limit=0,
            keepalive_timeout=KEEPALIVE_S,
            use_dns_cache=False,
            socket_factory=lambda address: _socket(address, write_timeout_s),
        )
        self._factory = cast("partial[ResponseHandler]", partial(_Connection, loop=self._loop))


class _Connection(ResponseHandler):
    """Ends at once: an instance that hangs would keep what it has not read of a request for ever.

    And what is wrong with it, its answer's reader is told too, where aiohttp lets it wait; of an answer that
    is complete, nothing is wrong.
    """

    def close(self) -> None:
        self.abort()

    def set_exception(self, exc: BaseException, exc_cause: BaseException = _NONE) -> None:
        super().set_exception(exc, exc_cause)
        if self._payload is not None and not self._payload.is_eof():
            self._payload.set_exception(exc, exc_cause)


def _socket(address: AddrInfoType, write_timeout_s: float) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(write_timeout_s * 1000))
    return made
