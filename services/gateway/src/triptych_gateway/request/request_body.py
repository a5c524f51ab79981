"""Reading a request's body, bounded in size and time."""

import asyncio
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request

from triptych_common.domain.errors import RequestError


async def read_body(
    request: Request, *, max_bytes: int, timeout_s: float, on_growth: Callable[[int], None]
) -> bytearray:
    """The whole body.

    Args:
        on_growth: called with the number of bytes before so many are held; may raise.

    Raises:
        RequestError: 413 too large; 408 the client stopped sending.
        ClientDisconnect: the client went away.
    """
    announced = announced_bytes(request)
    if announced is not None and announced > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                num_bytes = len(body) + len(chunk)
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes)
                on_growth(num_bytes)
                body += chunk
    except TimeoutError as error:
        raise RequestError(408, "body_timeout", "the body of the request did not arrive in time") from error
    return body


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(413, "body_too_large", f"the body of the request is larger than {max_bytes} bytes")


def announced_bytes(request: Request) -> int | None:
    """Content-Length; None when the body is chunked."""
    value = request.headers.get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() else None


async def wait_disconnect(request: Request, has_ended: Callable[[], bool]) -> None:
    """A guard, for when the body has been read: raises when the client goes away before the answer's end.

    `http.disconnect` comes also once the answer is complete, which `has_ended` distinguishes.

    Raises:
        ClientDisconnect: it did.
    """
    while (await request.receive())["type"] != "http.disconnect":
        pass
    if not has_ended():
        raise ClientDisconnect
