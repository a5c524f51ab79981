"""Reader of a request's body, bounded in size: text and media are split as it arrives."""

import asyncio
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

from triptych_common.domain.errors import RequestError
from triptych_gateway.request.body_splitter import BodySplitter, SplitBody

STEP = 64 << 10  # bytes that are split at once; then others have a turn


async def read_body(
    scope: Scope, receive: Receive, *, max_bytes: int, on_growth: Callable[[int], None]
) -> SplitBody:
    """Read the whole body of the ASGI request `scope`. Bound it.

    Args:
        on_growth: called with a number of bytes before they are held; may raise.

    Raises:
        RequestError: 413 too large.
        ClientDisconnect: the client went away.
    """
    announced = header_of(scope, b"content-length") or ""
    if announced.isascii() and announced.isdigit() and int(announced) > max_bytes:
        raise body_too_large(max_bytes)
    splitter = BodySplitter()
    async for chunk in Request(scope, receive).stream():
        if splitter.num_bytes + len(chunk) > max_bytes:
            raise body_too_large(max_bytes)
        on_growth(splitter.num_held + len(chunk))
        splitter.feed(chunk[:STEP])
        for at in range(STEP, len(chunk), STEP):
            await asyncio.sleep(0)
            splitter.feed(chunk[at : at + STEP])
        on_growth(splitter.num_held)
    return splitter.finish()


def body_timeout() -> RequestError:
    """Return the 408 for a client that stopped sending."""
    return RequestError(408, "body_timeout", "the body of the request did not arrive in time")


def header_of(scope: Scope, name: bytes) -> str | None:
    """Return the first header of this lower-case name, or None."""
    return next((value.decode("latin-1") for each, value in scope["headers"] if each == name), None)


def body_too_large(max_bytes: int) -> RequestError:
    """Return the 413 for a body of any content."""
    return RequestError(413, "body_too_large", f"the body of the request is larger than {max_bytes} bytes")


async def wait_disconnect(receive: Receive, has_ended: Callable[[], bool]) -> None:
    """Wait after the body; raise if the client goes away before the answer's end.

    `http.disconnect` comes also once the answer is complete, which `has_ended` distinguishes.

    Raises:
        ClientDisconnect: it went away before.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    if not has_ended():
        raise ClientDisconnect
