"""Relay of an answer to the client, from its first chunk on; `sse` finds events and their end."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect

from triptych_common.domain.errors import RequestError
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.chat.sse import cut_at_error
from triptych_gateway.chat.token_times import TokenTimes
from triptych_gateway.chat.upstream import Answer
from triptych_gateway.errors import unavailable
from triptych_gateway.race import Guard, StepTimer
from triptych_gateway.tracing.answer_facts import AnswerFacts
from triptych_gateway.upstream_client import UPSTREAM_ERRORS

log = get_logger(__name__)

PIECE_BYTES = 64 << 10  # of a whole answer: bound on the unread bytes in a connection's buffer

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientStream:
    """Response being sent to the client, with flags for its beginning and end.

    Every method waits while the client does not read, without a limit of its own.
    """

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        """Store `send`; `headers` are part of every answer."""
        self._send = send
        self._headers = headers
        self.has_begun = False
        self.has_ended = False

    def send_by(self, wrap: Callable[[Send], Send]) -> None:
        """Pass the answer through `wrap` from now on; call it before the answer begins."""
        self._send = wrap(self._send)

    async def begin_answer(self, headers: Mapping[str, str]) -> None:
        """Begin a good answer (status 200)."""
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


async def relay_whole(answer: Answer, client: ClientStream, timeout_s: float) -> None:
    """Pass on an answer that has arrived completely.

    Raises:
        ClientDisconnect: the client stays, and takes nothing for `timeout_s`: its place would never be free.
    """
    body = answer.first
    with Guard() as guard, StepTimer(guard, timeout_s) as timer:
        timer.begin_step(ClientDisconnect)
        await client.begin_answer({"Content-Type": answer.content_type, "Content-Length": str(len(body))})
        if len(body) <= PIECE_BYTES:
            await client.end_answer(body)
            return
        # Each piece waits until the one before is taken, so the request keeps its place until nearly all is.
        for start in range(0, len(body), PIECE_BYTES):
            timer.begin_step(ClientDisconnect)
            await client.write_chunk(body[start : start + PIECE_BYTES])
        timer.begin_step(ClientDisconnect)
        await client.end_answer()


async def relay_stream(
    answer: Answer,
    client: ClientStream,
    timeout_s: float,
    times: TokenTimes,
    facts: AnswerFacts | None = None,
) -> int:
    """Pass whole events through, untouched. A stream that breaks off is to end with an error event.

    Args:
        timeout_s: seconds for each chunk to arrive, and for the client to read it.
        times: records when tokens pass.
        facts: gets the events that pass, unless None.

    Returns:
        Number of chunks that were passed on.

    Raises:
        RequestError: the stream broke off, or the model failed; nothing was sent about it yet.
        ClientDisconnect: the client takes nothing.
    """
    headers = {"Content-Type": answer.content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    num_chunks = 0
    chunk = answer.first
    with Guard() as guard, StepTimer(guard, timeout_s) as timer:
        timer.begin_step(ClientDisconnect)
        await client.begin_answer(headers)
        while chunk:
            good, fault = cut_at_error(chunk)
            times.on_events(good)
            if good:
                timer.begin_step(ClientDisconnect)
                await client.write_chunk(good)
                num_chunks += 1
                if facts is not None:
                    facts.feed_events(good)
            if fault is not None:
                log.warning("model failed during a stream", error=str(fault.get("message"))[:500])
                raise unavailable("stream_interrupted", "the answer broke off: the model failed at it")
            timer.begin_step(_broken_off)
            try:
                chunk = await answer.next_events()
            except UPSTREAM_ERRORS as error:
                if answer.is_done:  # only the end of the connection was not in order
                    break
                log.warning("stream of prefill_decode broke off", error=repr(error), num_chunks=num_chunks)
                raise _interrupted() from error
        if not answer.is_done:
            log.warning("stream of prefill_decode ended early", num_chunks=num_chunks)
            raise _interrupted()
        timer.begin_step(ClientDisconnect)
        await client.end_answer()
    return num_chunks


class InterruptedStreamError(RequestError):
    """The connection to the instance ended in the middle of the answer."""


_INTERRUPTED = "the answer broke off: the serving instance went away"


def _interrupted() -> RequestError:
    return InterruptedStreamError(503, "stream_interrupted", _INTERRUPTED)


def _broken_off() -> RequestError:
    """Return the error for a stream that stalls: its instance may be busy, and has not ended."""
    log.warning("stream of prefill_decode broke off", error="nothing came in time")
    return unavailable("stream_interrupted", _INTERRUPTED)
