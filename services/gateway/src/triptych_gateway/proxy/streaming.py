"""Relay of an answer to the client, from its first chunk on; `sse` finds events and their end."""

import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect

from triptych_common.domain.errors import RequestError
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.endpoints.endpoint import ChatForm
from triptych_gateway.errors import unavailable
from triptych_gateway.metrics import LatencySeries
from triptych_gateway.proxy.sse import cut_at_error, num_roles_in, num_tokens_in
from triptych_gateway.proxy.upstream import Answer
from triptych_gateway.race import Guard, StepTimer
from triptych_gateway.tracing.answer_facts import AnswerFacts
from triptych_gateway.upstream_client import UPSTREAM_ERRORS

log = get_logger(__name__)

PIECE_BYTES = 64 << 10  # of a whole answer: bound on the unread bytes in a connection's buffer

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
EVENT_STREAM = "text/event-stream; charset=utf-8"  # vLLM's
COMMENT = b": waiting for an encoder\n\n"  # no event: clients ignore it
COMMENT_INTERVAL_S = 15.0  # proxies close a connection on which nothing comes for a minute, or for 30 s

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientStream:
    """Response being sent to the client, with flags for its beginning and end.

    Every method waits while the client does not read, without a limit of its own.
    """

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        """Store `send`; `headers` are part of every answer."""
        self._asgi_send = send
        self._send: Send = self._send_headers_once
        self._headers = headers
        self._commented_at = float("-inf")  # monotonic seconds
        self.has_headers = False  # they are sent: an error can only be an event
        self.has_begun = False
        self.has_ended = False

    def send_by(self, wrap: Callable[[Send], Send]) -> None:
        """Pass the answer through `wrap` from now on; call it before the answer begins."""
        self._send = wrap(self._send)

    async def keep_open(self) -> None:
        """Send the headers of a stream and a comment while its answer has not begun.

        Any number of calls send one comment in `COMMENT_INTERVAL_S`.
        """
        now = time.monotonic()
        if self.has_begun or self.has_ended or now - self._commented_at < COMMENT_INTERVAL_S:
            return
        self._commented_at = now
        # Not by `send_by`: nothing of the answer has begun.
        headers = {"Content-Type": EVENT_STREAM, **STREAM_HEADERS}
        await self._send_headers_once(self._start(headers))
        await self._asgi_send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def begin_answer(self, headers: Mapping[str, str]) -> None:
        self.has_begun = True
        await self._send(self._start(headers))

    def _start(self, headers: Mapping[str, str]) -> MutableMapping[str, Any]:
        both = {**self._headers, **headers}
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in both.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}

    async def _send_headers_once(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            if self.has_headers:
                return
            self.has_headers = True
        await self._asgi_send(message)

    async def write_chunk(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end_answer(self, chunk: bytes = b"") -> None:
        """Send the last bytes. The second call does nothing."""
        if not self.has_ended:
            self.has_ended = True
            send = self._send if self.has_begun else self._asgi_send
            await send({"type": "http.response.body", "body": chunk, "more_body": False})


class TokenTimes:
    """Token times of one answer. Its cost per chunk must be negligible beside the chunk's relay."""

    __slots__ = ("_arrived_at", "_first_at", "_form", "_inter_token_s", "_last_at", "_series", "num_tokens")

    def __init__(
        self, series: LatencySeries, arrived_at: float, form: ChatForm = ChatForm.COMPLETIONS
    ) -> None:
        """Store the series; `arrived_at` is the request's arrival in monotonic seconds."""
        self._series = series
        self._form = form
        self._inter_token_s = series.inter_token_s
        self._arrived_at = arrived_at
        self._first_at = 0.0  # 0: no token yet
        self._last_at = 0.0
        self.num_tokens = 0

    def on_events(self, events: bytes) -> None:
        """Record whole events of a stream. Several tokens at once have no gap between them."""
        num_tokens = num_tokens_in(events, self._form)
        if not self.num_tokens and self._form is ChatForm.COMPLETIONS:
            num_tokens -= num_roles_in(events)
        if num_tokens <= 0:
            return
        now = time.monotonic()
        if self.num_tokens:
            self._inter_token_s.observe(now - self._last_at)
        else:
            self._first_at = now
            self._series.first_token_s.observe(now - self._arrived_at)
        for _ in range(num_tokens - 1):
            self._inter_token_s.observe(0.0)
        self._last_at = now
        self.num_tokens += num_tokens

    def on_end(self) -> None:
        if self.num_tokens > 1:
            seconds = self._last_at - self._first_at
            self._series.per_output_token_s.observe(seconds / (self.num_tokens - 1))
        self._series.e2e_s.observe(time.monotonic() - self._arrived_at)


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
    headers = {"Content-Type": answer.content_type, **STREAM_HEADERS}
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
