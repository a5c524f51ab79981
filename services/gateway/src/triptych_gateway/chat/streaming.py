"""Relay of an answer to the client, from its first chunk on; `sse` finds events and their end."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import httpx
from starlette.requests import ClientDisconnect

from triptych_common.telemetry.logs import get_logger
from triptych_gateway.chat.sse import cut_at_error
from triptych_gateway.chat.upstream import Answer
from triptych_gateway.errors import unavailable

log = get_logger(__name__)

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientStream:
    """The response being sent. Knows whether it has begun, and whether it has ended.

    Every method raises ClientDisconnect when the client takes nothing for `timeout_s`: a client that stays,
    and does not read, would keep its place for ever.
    """

    def __init__(self, send: Send, headers: Mapping[str, str], timeout_s: float) -> None:
        """`headers`: of every answer, beside its own."""
        self._send_unbounded = send
        self._headers = headers
        self._timeout_s = timeout_s
        self.has_begun = False
        self.has_ended = False

    async def begin_answer(self, headers: Mapping[str, str]) -> None:
        """Begin a good answer (200)."""
        both = {**self._headers, **headers}
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in both.items()]
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def write_chunk(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end_answer(self, chunk: bytes = b"") -> None:
        """Send the last bytes. The second call does nothing."""
        if not self.has_ended:
            self.has_ended = True
            await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send_unbounded(message)
        except TimeoutError as error:
            raise ClientDisconnect from error


async def relay_whole(answer: Answer, client: ClientStream) -> None:
    """Pass an answer on that is there already."""
    await client.begin_answer({"Content-Type": answer.content_type, "Content-Length": str(len(answer.first))})
    await client.end_answer(answer.first)


async def relay_stream(answer: Answer, client: ClientStream, chunk_timeout_s: float) -> int:
    """Pass whole events through, untouched. A stream that breaks off is to end with an error event.

    Returns:
        Number of chunks that were passed on.

    Raises:
        RequestError: the stream broke off, or the model failed; nothing was sent about it yet.
    """
    await client.begin_answer(
        {"Content-Type": answer.content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
    num_chunks = 0
    chunk: bytes | None = answer.first
    try:
        while chunk is not None:
            good, fault = cut_at_error(chunk)
            if good:
                await client.write_chunk(good)
                num_chunks += 1
            if fault is not None:
                log.warning("model failed during a stream", error=str(fault.get("message"))[:500])
                raise unavailable("stream_interrupted", "the answer broke off: the model failed at it")
            chunk = await _next(answer, chunk_timeout_s)
    except (httpx.HTTPError, TimeoutError) as error:
        log.warning("stream of prefill_decode broke off", error=repr(error), num_chunks=num_chunks)
        message = "the answer broke off: the serving instance went away"
        raise unavailable("stream_interrupted", message) from error
    if not answer.cutter.is_done:
        log.warning("stream of prefill_decode ended early", num_chunks=num_chunks)
        raise unavailable("stream_interrupted", "the answer broke off: the serving instance went away")
    await client.end_answer()
    return num_chunks


async def _next(answer: Answer, timeout_s: float) -> bytes | None:
    async with asyncio.timeout(timeout_s):
        return await anext(answer.rest, None)
