"""uvicorn's HTTP protocol with limits that it lacks, and with errors in OpenAI's format.

Limits: bytes, number and time of a request's headers, what comes of a body that is answered already, requests
that a client sends ahead without waiting for answers, how long a client may take nothing of its answer, and
connections without a request that is being answered.

While nothing is being answered, a timer runs: uvicorn's own between requests, else this module's.
"""

import asyncio
import math
import socket
from enum import Enum, auto
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from triptych_common.domain.errors import RequestError
from triptych_common.telemetry.logs import LimitedLog, get_logger
from triptych_gateway.errors import error_response
from triptych_gateway.open_files import IdleConnections
from triptych_gateway.settings import GatewaySettings

log = get_logger(__name__)

MAX_HEADERS = 256  # of a request, with its trailers
MAX_AHEAD = 16  # requests on one connection behind the one that is being served
# Chunked bodies have a line per chunk: so many bytes of framing per byte of the body are honest.
FRAMING_PER_BYTE = 16
# Of a body whose request is answered. A close while the client still sends would take its answer away.
MAX_UNREAD_BYTES = 64 << 20


class _Place(Enum):
    """Place of the next byte, as the parser finds it."""

    BETWEEN = auto()  # empty lines, which a client may send before a request
    HEAD = auto()
    BODY = auto()


class BoundedHttpProtocol(HttpToolsProtocol):
    max_header_bytes: int
    header_timeout_s: float
    write_timeout_s: float
    idle: IdleConnections  # of its listener
    refusals: LimitedLog

    _place = _Place.BETWEEN
    _num_read = 0  # bytes since the last request ended
    _num_head = 0  # of the request, bytes of its line, headers and trailers
    _num_headers = 0  # of the request
    _num_body = 0  # of the request, bytes of its body
    _num_unread = 0  # of them, bytes that came after the answer
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _bound_unsent(transport, self.write_timeout_s)
        self._start_timer()
        self.idle.add(self, has_answered=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        self.idle.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._num_read += len(data)
        super().data_received(data)  # which stops uvicorn's timer
        if self.transport.is_closing():
            return
        if self._num_read - self._num_body > self.max_header_bytes + FRAMING_PER_BYTE * self._num_body:
            self._refuse_head(self._too_many_bytes)
        elif not self._is_answering:
            self._keep_watch()

    # ---- what the parser finds; it goes on to the end of the data, also behind a refusal ----------
    def on_message_begin(self) -> None:
        self._place = _Place.HEAD
        self._num_head = self._num_headers = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._fits_head(len(url)):
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self._refuse_head(f"the request has more than {MAX_HEADERS} headers")
        elif self._fits_head(len(name) + len(value) + len(b": \r\n")):
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._place = _Place.BODY
        self._stop_timer()
        if self.transport.is_closing():
            return
        if len(self.pipeline) >= MAX_AHEAD:
            self.refusals.info("connection closed: too many requests sent ahead", limit=MAX_AHEAD)
            self.transport.close()
            return
        self.idle.discard(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        self._num_body += len(body)
        if not self._is_answering:
            self._num_unread += len(body)
            if self._num_unread > MAX_UNREAD_BYTES:
                self.refusals.info(
                    "connection closed: the body continues after its answer", limit=MAX_UNREAD_BYTES
                )
                self.transport.close()
                return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._place = _Place.BETWEEN
        self._num_read = self._num_body = self._num_unread = 0
        if self.transport.is_closing():
            return
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which starts the next answer, or uvicorn's timer
        if not self._is_answering and not self.transport.is_closing():
            self.idle.add(self, has_answered=True)
        is_between = self._place is _Place.BETWEEN
        if not is_between and not self._is_answering and not self.transport.is_closing():
            self._keep_watch()

    # ---- an answer that is not read ---------------------------------------------------------------
    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _start_write_timer(self) -> None:
        num_left = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.write_timeout_s, self._on_not_read, num_left)

    def _on_not_read(self, num_left: int) -> None:
        """Close the connection of a client that reads nothing: its request ends as if it had gone away.

        Args:
            num_left: bytes that waited for the client when the timer was set.
        """
        if self.transport.get_write_buffer_size() < num_left:
            self._start_write_timer()  # a slow client, which reads
            return
        self.refusals.info("connection closed: the client does not read", seconds=self.write_timeout_s)
        self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # ---- idle connections -------------------------------------------------------------------------
    def close_idle(self) -> None:
        """Close this idle connection at once, without waiting for unsent bytes."""
        self.refusals.info("connection closed: too many are idle", place=self._place.name)
        self.transport.abort()

    # ---- bounds -----------------------------------------------------------------------------------
    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # the last one; None before the first request
        return cycle is not None and not cycle.response_complete

    def _keep_watch(self) -> None:
        """Let one timer run while nothing is being answered."""
        if self._place is _Place.BETWEEN and not self._num_read:
            if self._timer is None and self.timeout_keep_alive_task is None:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            return
        self._unset_keepalive_if_required()
        if self._timer is None:
            self._start_timer()

    def _fits_head(self, num_bytes: int) -> bool:
        """Return whether the head may have `num_bytes` more; refuse the request if not."""
        if self.transport.is_closing():
            return False
        self._num_head += num_bytes
        if self._num_head > self.max_header_bytes:
            self._refuse_head(self._too_many_bytes)
            return False
        return True

    @property
    def _too_many_bytes(self) -> str:
        return f"the headers of the request are larger than {self.max_header_bytes} bytes"

    def _refuse_head(self, message: str) -> None:
        self._refuse(RequestError(431, "headers_too_large", message))

    def send_400_response(self, msg: str) -> None:
        """Send uvicorn's answer to bytes that are no HTTP."""
        self._refuse(RequestError(400, "invalid_http", msg))

    def _refuse(self, error: RequestError) -> None:
        """Answer and close, without an answer if one has begun."""
        if self.transport.is_closing():
            return
        self._stop_timer()
        self.refusals.info("connection refused", error.code, code=error.code)
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        if cycle is None or (not self.pipeline and (cycle.response_complete or not cycle.response_started)):
            if cycle is not None:
                cycle.disconnected = True
            answer = error_response(error, {"Connection": "close"})
            head = f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}\r\n".encode()
            lines = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
            self.transport.write(head + lines + b"\r\n" + bytes(answer.body))
        self.transport.close()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.header_timeout_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._place is _Place.HEAD:
            self._refuse(RequestError(408, "header_timeout", "the headers did not arrive in time"))
        else:
            self.refusals.info("connection closed: no complete request in time", place=self._place.name)
            self.transport.close()


def bounded_protocol(settings: GatewaySettings, max_idle: float = math.inf) -> type[BoundedHttpProtocol]:
    """Return the protocol class with these bounds, for one uvicorn listener.

    `max_idle` bounds the connections without a request.
    """

    class Bounded(BoundedHttpProtocol):
        max_header_bytes = settings.max_header_bytes
        header_timeout_s = settings.header_timeout_s
        write_timeout_s = settings.chunk_timeout_s  # in which a client may read nothing of its answer
        idle = IdleConnections(max_idle)
        refusals = LimitedLog(log)

    return Bounded


def _bound_unsent(transport: asyncio.Transport, timeout_s: float) -> None:
    """Have the system end a connection whose bytes are not taken in time, also after the answer."""
    sock = transport.get_extra_info("socket")
    if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
