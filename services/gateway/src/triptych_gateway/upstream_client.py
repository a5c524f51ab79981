"""The HTTP client for prefill_decode: one write per request, connections kept in a table per instance.

No redirects, no cookies, no proxies, no decompression. At most twice `READ_AHEAD_BYTES` of an unread answer
are buffered; a connection that is given up is aborted, with whatever it has not sent.

A connection whose answer is 5xx is not kept: uvicorn closes it a moment later where the application raised.
A kept connection may be closed by its server just as the next request is written to it. The request is sent
once more, to the same instance on a new connection. If the instance refuses that one, it has ended, perhaps
because of the request: the first failure is raised.
"""

import errno
import socket
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import cast

from aiohttp import (
    AddrInfoType,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    ServerDisconnectedError,
    TCPConnector,
)
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest, ConnectionKey
from aiohttp.connector import Connection
from aiohttp.helpers import _EXC_SENTINEL as _NONE
from aiohttp.http import RawResponseMessage
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader
from aiohttp.tracing import Trace
from yarl import URL

from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

KEEPALIVE_S = 2.0  # below the server's own, so that an idle connection is not used as it closes
READ_AHEAD_BYTES = 64 << 10
MAX_HEADER_BYTES = 16 << 10  # of an answer, for each line
# Errors of sending a request and reading its answer; the last two for an invalid URL.
UPSTREAM_ERRORS = (ClientError, HttpProcessingError, OSError, ValueError)
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_CLOSED_BY_PEER = frozenset({errno.ECONNRESET, errno.EPIPE})


class NotSentError(ClientError):
    """No connection was made: the instance has nothing of the request."""


@dataclass(slots=True)
class _Sending:
    needs_new: bool = False  # no kept connection will do
    connection: "_Connection | None" = None  # that it was written to; None: to none

    def met_closed_connection(self, error: Exception) -> bool:
        """Return whether the peer had closed the kept connection that the request was written to."""
        if self.connection is None or self.connection.num_requests == 1:
            return False
        has_ended = isinstance(error, ServerDisconnectedError | ConnectionResetError)
        return has_ended or (isinstance(error, OSError) and error.errno in _CLOSED_BY_PEER)


_sending: ContextVar[_Sending | None] = ContextVar("sending", default=None)  # of this task


def new_client(connect_timeout_s: float, write_timeout_s: float) -> ClientSession:
    """Return the client of one gateway. `RequestLimiter` bounds the connections; deadlines bound the first
    chunk.

    Args:
        connect_timeout_s: seconds to look up the name and to connect.
        write_timeout_s: seconds after which an instance that reads nothing of a request is given up.
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

    Raises:
        NotSentError: the instance has not got anything of the request.
        UPSTREAM_ERRORS: the connection broke off after it was made, or what came is no answer. Reading the
            answer raises them too.
    """
    sending = _Sending()
    try:
        return await _send(client, sending, url, body, headers, method)
    except UPSTREAM_ERRORS as error:
        if sending.connection is None:
            raise NotSentError(f"{type(error).__name__}: {error}") from error
        if not sending.met_closed_connection(error):
            raise
        log.info("request sent again: its kept connection was closed", url=url, error=repr(error))
        try:
            return await _send(client, _Sending(needs_new=True), url, body, headers, method)
        except UPSTREAM_ERRORS:
            raise error from None


async def _send(
    client: ClientSession,
    sending: _Sending,
    url: str,
    body: bytes,
    headers: Mapping[str, str] | None,
    method: str,
) -> ClientResponse:
    token = _sending.set(sending)
    try:
        return await client.request(
            method,
            URL(url, encoded=True),
            data=body or None,
            headers={**_HEADERS, **(headers or {})},
            allow_redirects=False,
        )
    finally:
        _sending.reset(token)


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

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout) -> Connection:
        connection = await super().connect(req, traces, timeout)
        if (sending := _sending.get()) is not None:
            sending.connection = cast("_Connection", connection.protocol)
            sending.connection.num_requests += 1
        return connection

    async def _get(self, key: ConnectionKey, traces: list[Trace]) -> Connection | None:
        if (sending := _sending.get()) is not None and sending.needs_new:
            return None
        return await super()._get(key, traces)


class _Connection(ResponseHandler):
    """Connection that is aborted at once, since an instance that hangs would keep unread bytes for ever; the
    reader of an incomplete answer gets its error, for which aiohttp would let it wait.
    """

    num_requests = 0

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Read an answer's headers; after a server error the connection is not kept."""
        if data[0].code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.force_close()
        super().feed_data(data, size)

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
