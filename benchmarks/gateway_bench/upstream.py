"""A prefill_decode without a model: `python -m gateway_bench.upstream PORT`.

Each chat completion is answered after `first_ms` with one event, then `num_events - 1` more, `gap_ms` apart,
each written by itself as vLLM does it; a whole answer comes at the time of the last event. The request's
field `user` says which: "NUM_EVENTS,FIRST_MS,GAP_MS". With a fourth word, "stamped", each event's text is its
number and the time at which it is written, in nanoseconds. It costs a fraction of what it measures.
"""

import asyncio
import sys
import time
from functools import partial
from typing import cast

import httptools
import orjson
import uvloop

MODEL = "fake-vl"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def _framed(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def _event(choices: list[dict[str, object]]) -> bytes:
    event = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": MODEL,
        "choices": choices,
        "usage": None,
    }
    return b"data: " + orjson.dumps(event) + b"\n\n"


_TOKEN_EVENT = _event([{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}])
_TOKEN = _framed(_TOKEN_EVENT)
_TEXT = b'" word"'
_LAST = _framed(
    _event([{"index": 0, "delta": {"content": " end"}, "logprobs": None, "finish_reason": "stop"}])
)
_DONE = _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _whole(num_events: int) -> bytes:
    message = {"role": "assistant", "content": " word" * num_events}
    answer = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion",
        "created": 1700000000,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": num_events, "total_tokens": num_events + 1},
    }
    body = orjson.dumps(answer)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Upstream(asyncio.Protocol):
    """One connection, one request after the other."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        fields = orjson.loads(self._body)
        numbers, stamped = fields["user"].split(",")[:3], fields["user"].endswith(",stamped")
        num_events, first_ms, gap_ms = map(float, numbers)
        if stamped:
            self._after(first_ms, partial(self._stamped, 0, int(num_events), gap_ms, head=_STREAM_HEAD))
        elif fields.get("stream"):
            self._after(first_ms, partial(self._event, int(num_events), gap_ms, head=_STREAM_HEAD))
        else:
            self._after(first_ms + gap_ms * (num_events - 1), partial(self._write, _whole(int(num_events))))

    def _event(self, num_left: int, gap_ms: float, head: bytes = b"") -> None:
        if num_left > 1:
            self._write(head + _TOKEN)
            self._after(gap_ms, partial(self._event, num_left - 1, gap_ms))
        else:
            self._write(head + _LAST + _DONE)

    def _stamped(self, number: int, num_events: int, gap_ms: float, head: bytes = b"") -> None:
        """`perf_counter` is one clock for all processes of the machine."""
        text = b'"%d %d"' % (number, time.perf_counter_ns())
        if number < num_events - 1:
            self._after(gap_ms, partial(self._stamped, number + 1, num_events, gap_ms))
            self._write(head + _framed(_TOKEN_EVENT.replace(_TEXT, text)))
        else:
            self._write(head + _framed(_TOKEN_EVENT.replace(_TEXT, text)) + _LAST + _DONE)

    def _after(self, delay_ms: float, act: partial[None]) -> None:
        if delay_ms:
            self._loop.call_later(delay_ms / 1000, act)
        else:
            self._loop.call_soon(act)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
