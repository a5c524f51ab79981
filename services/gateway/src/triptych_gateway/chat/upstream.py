"""HTTP to prefill_decode, up to the first chunk of its answer.

Until then nothing has been sent to the client, so the request can still go to another instance
(`UnreachableError`) or become a proper HTTP error (`RequestError`).
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from triptych_common.domain.errors import RequestError, TriptychError
from triptych_common.runtime import DRAINING_HEADER
from triptych_common.runtime.http_client import new_http_client
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.chat.sse import EventCutter, error_in_first_event
from triptych_gateway.errors import unavailable

log = get_logger(__name__)

CHAT_PATH = "/v1/chat/completions"
_NOT_NOW = frozenset({502, 503})  # starting, draining, or its engine is dead: another instance may take it
# vLLM's for a prompt that is too long, which it finds in three places and gives no code.
TOO_LONG_PHRASES = ("maximum context length", "longer than the maximum model length")
MAX_ERROR_BYTES = 64 << 10
KEEPALIVE_S = 2.0  # below the server's own, so that an idle connection is not used as it closes


class UnreachableError(TriptychError):
    """The instance did not take the request, or went away before it answered anything."""


class DrainingError(UnreachableError):
    """The instance is going away: it has done nothing with the request."""


@dataclass
class Answer:
    """An answer that has begun well (2xx)."""

    content_type: str
    first: bytes  # whole events when streamed, else the whole body
    rest: AsyncIterator[bytes]  # further whole events
    cutter: EventCutter


def new_client(connect_timeout_s: float, chunk_timeout_s: float) -> httpx.AsyncClient:
    """One per gateway. `RequestLimiter` bounds the connections; deadlines bound the first chunk."""
    return new_http_client(
        httpx.Timeout(chunk_timeout_s, connect=connect_timeout_s, read=None, pool=connect_timeout_s),
        httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEPALIVE_S),
    )


@asynccontextmanager
async def open_answer(
    client: httpx.AsyncClient, base_url: str, body: bytes, headers: dict[str, str], *, stream: bool
) -> AsyncIterator[Answer]:
    """Send `body` and yield the answer at its first chunk. Leaving the block aborts what is still running.

    Raises:
        UnreachableError: no answer has begun; another instance may be tried.
        DrainingError: likewise, and this one is going away.
        RequestError: prefill_decode refused the request (4xx), or failed at it (503).
    """
    try:
        request = client.build_request(
            "POST",
            base_url.rstrip("/") + CHAT_PATH,
            content=body,
            headers={**headers, "Content-Type": "application/json", "Accept-Encoding": "identity"},
        )
        response = await client.send(request, stream=True)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # the last two: no URL at all
        raise UnreachableError(f"{type(error).__name__}: {error}") from error
    try:
        yield await _begin(response, stream)
    finally:
        await response.aclose()


async def _begin(response: httpx.Response, stream: bool) -> Answer:
    cutter = EventCutter()
    try:
        if DRAINING_HEADER in response.headers:
            raise DrainingError(f"status {response.status_code}")
        if response.status_code in _NOT_NOW:
            raise UnreachableError(f"status {response.status_code}")
        if response.status_code >= 300:
            raise upstream_error(response.status_code, await _read_some(response))
        if not stream:
            return Answer(_content_type(response), await response.aread(), _nothing(), cutter)
        chunks = response.aiter_raw()
        first = b""
        async for chunk in chunks:
            first = cutter.feed(chunk)
            if first:
                break
    except httpx.HTTPError as error:
        raise UnreachableError(f"{type(error).__name__}: {error}") from error
    if not first:
        raise UnreachableError("the answer ended before its first event")
    fault = error_in_first_event(first)
    if fault is not None:
        raise _from_error_object(_status_of(fault), fault)
    return Answer(_content_type(response), first, _whole_events(chunks, cutter), cutter)


async def _whole_events(chunks: AsyncIterator[bytes], cutter: EventCutter) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        whole = cutter.feed(chunk)
        if whole:
            yield whole


async def _nothing() -> AsyncIterator[bytes]:
    for chunk in tuple[bytes, ...]():
        yield chunk


async def _read_some(response: httpx.Response) -> bytes:
    body = b""
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_ERROR_BYTES:
            break
    return body


def _content_type(response: httpx.Response) -> str:
    return str(response.headers.get("content-type", "application/json"))


def upstream_error(status_code: int, body: bytes) -> RequestError:
    """What the caller gets of an error answer of prefill_decode."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    error = parsed.get("error") if isinstance(parsed, dict) else None
    return _from_error_object(status_code, error if isinstance(error, dict) else {})


def _from_error_object(status_code: int, error: dict[str, Any]) -> RequestError:
    message = error.get("message")
    if 400 <= status_code < 500:
        param, code = error.get("param"), error.get("code")
        if isinstance(message, str) and any(phrase in message for phrase in TOO_LONG_PHRASES):
            return RequestError(400, "context_length_exceeded", message, "messages")
        return RequestError(
            status_code,
            code if isinstance(code, str) else "invalid_request",
            message if isinstance(message, str) else "the request was refused",
            param if isinstance(param, str) else None,
        )
    log.warning("prefill_decode failed before its first token", status=status_code, error=str(message)[:500])
    return unavailable("generation_failed", "the model failed at this request before its first token")


def _status_of(error: dict[str, Any]) -> int:
    code = error.get("code")
    return code if isinstance(code, int) and 400 <= code <= 599 else 500
