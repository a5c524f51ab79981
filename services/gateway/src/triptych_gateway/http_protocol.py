"""uvicorn's HTTP protocol with bounds that it lacks: on the bytes and the time of a request's head, and on
requests that a client sends ahead without waiting for answers. And with errors in OpenAI's format.

    head (line and headers) -> body -> (answered) -> head ...
"""

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from triptych_common.domain.errors import RequestError
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.openai_errors import error_response

log = get_logger(__name__)

MAX_AHEAD = 16  # requests on one connection behind the one that is being served
# Chunked bodies have a line per chunk: so many bytes of framing per byte of the body are honest.
FRAMING_PER_BYTE = 16


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. `bounded_protocol` makes the class that has the bounds."""

    max_header_bytes: int
    header_timeout_s: float

    _awaits_head = True
    _num_read = 0  # bytes since the request began
    _num_body = 0  # of them, bytes of its body
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._awaits_head and self._head_timer is None:
            self._start_head_timer()
        self._num_read += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        framing = self._num_read - self._num_body
        if framing > self.max_header_bytes + FRAMING_PER_BYTE * self._num_body:
            self._refuse(
                RequestError(
                    431,
                    "headers_too_large",
                    f"the headers of the request are larger than {self.max_header_bytes} bytes",
                )
            )

    def on_headers_complete(self) -> None:
        self._awaits_head = False
        self._stop_head_timer()
        if len(self.pipeline) >= MAX_AHEAD:
            log.info("connection closed: too many requests sent ahead", limit=MAX_AHEAD)
            self.transport.close()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._awaits_head = True
        self._num_read = self._num_body = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP."""
        self._refuse(RequestError(400, "invalid_http", msg))

    def _refuse(self, error: RequestError) -> None:
        """Answer and close; without an answer where it would stand within another one."""
        self._stop_head_timer()
        log.info("connection refused", code=error.code)
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        if cycle is None or (not self.pipeline and (cycle.response_complete or not cycle.response_started)):
            if cycle is not None:
                cycle.disconnected = True
            answer = error_response(error, {"Connection": "close"})
            head = f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}\r\n".encode()
            lines = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
            self.transport.write(head + lines + b"\r\n" + bytes(answer.body))
        self.transport.close()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.header_timeout_s, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        if self.transport.is_closing():
            return
        if self._num_read:
            self._refuse(RequestError(408, "header_timeout", "the headers did not arrive in time"))
        else:
            self.transport.close()


def bounded_protocol(max_bytes: int, timeout_s: float) -> type[BoundedHttpProtocol]:
    """The protocol with these bounds, as uvicorn takes it: a class."""

    class Bounded(BoundedHttpProtocol):
        max_header_bytes = max_bytes
        header_timeout_s = timeout_s

    return Bounded
