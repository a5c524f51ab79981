"""HTTP to prefill_decode, up to the first chunk of its answer.

Until then nothing has been sent to the client, so the request can still go to another instance
(`UnreachableError`) or become a proper HTTP error (`RequestError`).
"""

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self

from aiohttp import ClientResponse, ClientSession

from triptych_common.domain.errors import RequestError, TriptychError
from triptych_common.runtime import DRAINING_HEADER
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.endpoints.endpoint import Endpoint
from triptych_gateway.endpoints.table import CHAT
from triptych_gateway.errors import unavailable
from triptych_gateway.proxy.sse import EventCutter, error_in_first_event
from triptych_gateway.tracing.answer_facts import object_in, object_of
from triptych_gateway.upstream_client import UPSTREAM_ERRORS, NotSentError, open_response

log = get_logger(__name__)

_NOT_NOW = frozenset({502, 503})  # starting, draining, or its engine is dead: another instance may take it
ENGINE_DIED = "engine_died"  # prefill_decode's code for a request that its engine had as it died
# vLLM's for a prompt that is too long, which it finds in several places and gives no code.
NO_ROUTE_PHRASES = (None, "Not Found")  # its 404 for a path that it does not serve with this model
TOO_LONG_PHRASES = (
    "maximum context length",
    "longer than the maximum model length",
    "exceeds the max_model_len",
)
RESPONSE_PARAM = "response_id"  # of vLLM's 404 for a stored response
# vLLM's Messages API cannot read an error in its own chat stream, and reports that with the error's end.
_HIDDEN_START, _HIDDEN_CODE, _HIDDEN_END = "input_value={'error': {", "'code': 4", "}}, input_type="
MAX_ERROR_BYTES = 64 << 10
MAX_MESSAGE_CHARS = 2000  # of an error's text, cut before anything looks at it
MAX_PARAM_CHARS = 300
ERROR_BODY_TIMEOUT_S = 1.0  # of an instance that refuses: it may be going away


class UnreachableError(TriptychError):
    """The instance did not take the request, or went away before it answered anything."""

    def __init__(self, detail: str, status: int | None = None, code: str | None = None) -> None:
        """Store the failure, with status and error code of the answer that refused the request, if any."""
        super().__init__(detail)
        self.status, self.code = status, code


class BrokenOffError(UnreachableError):
    """The connection ended, or the engine died, while the instance had the request: perhaps because of it."""


class DrainingError(UnreachableError):
    """The instance is going away: it has done nothing with the request."""


@dataclass(slots=True)
class Answer:
    """Answer that has begun well (2xx)."""

    content_type: str
    first: bytes  # whole events when streamed, else the whole body
    _response: ClientResponse
    _cutter: EventCutter

    @property
    def is_done(self) -> bool:
        """True once the last event has passed."""
        return self._cutter.is_done

    def close(self) -> None:
        """Close the answer: a connection that was read to the end is kept, others are aborted."""
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def next_events(self) -> bytes:
        """Return further whole events; b"" at the end, which may be too early (`is_done`).

        Raises:
            UPSTREAM_ERRORS: the connection broke off, or the answer is no HTTP.
        """
        return await _next_events(self._response, self._cutter)


async def open_answer(
    client: ClientSession,
    base_url: str,
    body: bytes,
    headers: dict[str, str],
    endpoint: Endpoint = CHAT,
    *,
    stream: bool,
    path: str | None = None,
    max_bytes: int,
) -> Answer:
    """Send `body` and return the answer at its first chunk. Closing it aborts what is still running.

    Args:
        path: path with its query; None: the endpoint's.

    Raises:
        UnreachableError: no answer has begun; another instance may be tried. In no case anything stays open.
        BrokenOffError: the same, and this one may have ended because of the request.
        DrainingError: the same, and this one is going away.
        RequestError: prefill_decode refused the request (4xx), or failed at it (503); 413, a whole answer has
            more than `max_bytes`.
    """
    try:
        url = base_url.rstrip("/") + (endpoint.path if path is None else path)
        response = await open_response(client, url, body, headers, endpoint.methods[0])
    except NotSentError as error:
        raise UnreachableError(str(error)) from error
    except UPSTREAM_ERRORS as error:
        raise BrokenOffError(f"{type(error).__name__}: {error}") from error
    try:
        return await _begin(response, endpoint, stream, max_bytes)
    except BaseException:
        response.close()
        raise


async def _begin(response: ClientResponse, endpoint: Endpoint, stream: bool, max_bytes: int) -> Answer:
    cutter = EventCutter(endpoint.chat_form)
    try:
        if DRAINING_HEADER in response.headers:
            raise DrainingError(f"status {response.status}")
        if response.status in _NOT_NOW:
            code = await _code_of(response)
            kind = BrokenOffError if code == ENGINE_DIED else UnreachableError
            raise kind(f"status {response.status}", response.status, code)
        if response.status >= 300:
            raise upstream_error(response.status, await _read_some(response), endpoint)
        if not stream:
            return Answer(_content_type(response), await _read_whole(response, max_bytes), response, cutter)
        first = await _next_events(response, cutter)
    except UPSTREAM_ERRORS as error:
        raise BrokenOffError(f"{type(error).__name__}: {error}") from error
    if not first:
        raise BrokenOffError("the answer ended before its first event")
    fault = error_in_first_event(first)
    if fault is not None:
        raise first_event_error(fault, endpoint)
    return Answer(_content_type(response), first, response, cutter)


async def _next_events(response: ClientResponse, cutter: EventCutter) -> bytes:
    while chunk := await response.content.readany():
        if whole := cutter.feed(chunk):
            return whole
    return b""


async def _read_whole(response: ClientResponse, max_bytes: int) -> bytes:
    """Read the body. A body that ends with its connection may have been cut off."""
    if response.content_length is None and "chunked" not in response.headers.get("Transfer-Encoding", ""):
        raise BrokenOffError("the answer has no length")
    pieces, num_bytes = list[bytes](), 0
    while piece := await response.content.readany():
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            message = f"the answer has more than {max_bytes} bytes; ask for less at once"
            raise RequestError(413, "answer_too_large", message, None)
    return b"".join(pieces)


async def _code_of(response: ClientResponse) -> str | None:
    """Return the code of an error answer if it is a text, and arrives at once; else None."""
    try:
        async with asyncio.timeout(ERROR_BODY_TIMEOUT_S):
            body = await _read_some(response)
    except (TimeoutError, *UPSTREAM_ERRORS):
        return None
    code = object_of(object_in(body).get("error")).get("code")
    return code if isinstance(code, str) else None


async def _read_some(response: ClientResponse) -> bytes:
    body = b""
    while len(body) <= MAX_ERROR_BYTES and (chunk := await response.content.readany()):
        body += chunk
    return body


def _content_type(response: ClientResponse) -> str:
    return response.headers.get("Content-Type", "application/json")


def upstream_error(status_code: int, body: bytes, endpoint: Endpoint = CHAT) -> RequestError:
    """Return the caller's error for an error answer of prefill_decode."""
    return _from_error_object(status_code, object_of(object_in(body).get("error")), endpoint)


def _from_error_object(status_code: int, error: dict[str, Any], endpoint: Endpoint) -> RequestError:
    message = _cut(error.get("message"), MAX_MESSAGE_CHARS)
    if status_code == HTTPStatus.NOT_IMPLEMENTED or (
        status_code == HTTPStatus.NOT_FOUND and message in NO_ROUTE_PHRASES
    ):
        return RequestError(
            status_code, "endpoint_not_served", f"this model does not serve {endpoint.path}", "model"
        )
    if 400 <= status_code < 500:
        param, code = (_cut(error.get(name), MAX_PARAM_CHARS) for name in ("param", "code"))
        if isinstance(message, str) and any(phrase in message for phrase in TOO_LONG_PHRASES):
            return RequestError(400, "context_length_exceeded", message, next(iter(endpoint.inputs), None))
        if status_code == HTTPStatus.NOT_FOUND and param == RESPONSE_PARAM:
            return RequestError(404, "response_not_found", str(message), RESPONSE_PARAM)
        return RequestError(
            status_code,
            code if isinstance(code, str) else "invalid_request",
            message if isinstance(message, str) else "the request was refused",
            param if isinstance(param, str) else None,
        )
    log.warning("prefill_decode failed before its first token", status=status_code, error=str(message)[:500])
    return unavailable("generation_failed", "the model failed at this request before its first token")


def first_event_error(error: dict[str, Any], endpoint: Endpoint = CHAT) -> RequestError:
    """Return the caller's error for an error object in a stream's first event."""
    if _hides_refusal(_cut(error.get("message"), MAX_MESSAGE_CHARS)):
        return RequestError(400, "invalid_request", "the request was refused")
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    return _from_error_object(status, error, endpoint)


def _cut(value: Any, max_chars: int) -> Any:
    return value[:max_chars] if isinstance(value, str) else value


def _hides_refusal(message: Any) -> bool:
    """Return whether `message` is vLLM's report of an error of 4xx that it could not read."""
    if not isinstance(message, str) or _HIDDEN_START not in message:
        return False
    head, found, _ = message.partition(_HIDDEN_START)[2].rpartition(_HIDDEN_END)
    code = head.rpartition(_HIDDEN_CODE)[2]
    return bool(found) and len(code) == 2 and code.isascii() and code.isdigit()
