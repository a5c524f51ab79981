"""What a prefill_decode, or something in its place, may do on a connection: raw bytes from a real server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession

from tests.support.waiting import until
from triptych_common.domain.errors import RequestError
from triptych_gateway.proxy.upstream import BrokenOffError, DrainingError, UnreachableError, open_answer
from triptych_gateway.upstream_client import READ_AHEAD_BYTES, UPSTREAM_ERRORS, new_client

EVENT = b'data: {"choices": []}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
LIMIT_S = 60.0
MAX_BYTES = 64 << 20

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Server:
    """Reads a request, then does what it was made for."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.url = ""
        self.stop: Callable[[], None] = lambda: None
        self.num_connections = self.num_requests = self.num_closed = 0
        self.heads: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)  # every request of these tests is {}
                self.num_requests += 1
                self.heads.append(head)
                await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_closed += 1
            writer.close()


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[Server, ClientSession]]:
    server = Server(answer)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.stop = listener.close
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with asyncio.timeout(LIMIT_S), new_client(2.0, 5.0) as client:
        yield server, client
    listener.close()
    await until(lambda: server.num_closed == server.num_connections)


def sends(*pieces: bytes, closes: bool = True) -> Answer:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if closes:
            raise ConnectionError("as planned")

    return answer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 20",
        b"nonsense\r\n\r\n",
        b"\x00\xff" * 100,
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 10_000 + b"\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
        STREAM,
        STREAM + b"zz\r\n",
        STREAM + framed(b'data: {"half'),
        STREAM + b"fffff\r\ndata: ",
    ],
    ids=lambda answer: repr(answer[:60]),
)
async def test_what_is_no_answer_means_broken_off(answer: bytes, stream: bool) -> None:
    async with serving(sends(answer)) as (server, client):
        with pytest.raises(BrokenOffError):
            await open_answer(client, server.url, b"{}", {}, stream=stream, max_bytes=MAX_BYTES)
        assert server.num_requests == 1  # it may have been served: it is not sent again


async def test_a_whole_answer_without_a_length_might_be_cut_off() -> None:
    async with serving(sends(b'HTTP/1.1 200 OK\r\n\r\n{"half"')) as (server, client):
        with pytest.raises(BrokenOffError):
            await open_answer(client, server.url, b"{}", {}, stream=False, max_bytes=MAX_BYTES)


@pytest.mark.parametrize(
    "rest",
    [b"", b"10\r\ndata: ", framed(b"data: half"), b"zz\r\n", b"0\r\n"],
    ids=["between chunks", "in a chunk", "in an event", "no chunk", "in the last chunk"],
)
async def test_a_stream_that_is_cut_off_is_an_error_and_never_an_end(rest: bytes) -> None:
    go_on = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + framed(EVENT))
        await go_on.wait()
        writer.write(rest)
        raise ConnectionError("as planned")

    async with serving(answer) as (server, client):
        with await open_answer(client, server.url, b"{}", {}, stream=True, max_bytes=MAX_BYTES) as opened:
            assert opened.first == EVENT
            go_on.set()
            with pytest.raises(UPSTREAM_ERRORS):
                await opened.next_events()
            assert not opened.is_done


@pytest.mark.parametrize("junk", [b"", b"nonsense\r\n"], ids=["end", "junk"])
async def test_what_came_whole_is_read_whole_though_its_connection_has_ended(junk: bytes) -> None:
    go_on = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + framed(EVENT))
        await go_on.wait()
        writer.write(framed(EVENT) + framed(DONE) + b"0\r\n\r\n" + junk)
        raise ConnectionError("as planned")

    async with serving(answer) as (server, client):
        with await open_answer(client, server.url, b"{}", {}, stream=True, max_bytes=MAX_BYTES) as opened:
            go_on.set()
            await until(lambda: server.num_closed == 1)
            await until(lambda: not client.connector or not client.connector._acquired)  # its end was seen
            rest = b""
            while events := await opened.next_events():
                rest += events
            assert (rest, opened.is_done) == (EVENT + DONE, True)


async def test_a_stream_that_ends_with_its_connection_is_not_done() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    async with serving(sends(head + EVENT)) as (server, client):
        with await open_answer(client, server.url, b"{}", {}, stream=True, max_bytes=MAX_BYTES) as opened:
            assert await opened.next_events() == b""
            assert not opened.is_done


async def test_an_answer_that_is_whole_keeps_its_connection() -> None:
    async with serving(sends(STREAM + framed(EVENT) + framed(DONE) + b"0\r\n\r\n", closes=False)) as (
        server,
        client,
    ):
        for _ in range(3):
            with await open_answer(
                client, server.url, b"{}", {"traceparent": "x"}, stream=True, max_bytes=MAX_BYTES
            ) as opened:
                while await opened.next_events():
                    pass
                assert opened.is_done
        assert (server.num_connections, server.num_requests) == (1, 3)
        head = server.heads[0].lower()
        assert head.startswith(b"post /v1/chat/completions http/1.1\r\n")
        for line in (b"accept-encoding: identity", b"content-type: application/json", b"traceparent: x"):
            assert line in head
        for name in (b"user-agent", b"cookie", b"authorization"):
            assert name not in head


async def test_an_idle_connection_that_was_closed_is_not_used() -> None:
    async with serving(sends(WHOLE)) as (server, client):
        for _ in range(2):
            with await open_answer(
                client, server.url, b"{}", {}, stream=False, max_bytes=MAX_BYTES
            ) as opened:
                assert opened.first == b"{}"
            await until(lambda: server.num_closed == server.num_connections)
            kept = [each for kept in client.connector._conns.values() for each, _ in kept]
            await until(lambda kept=kept: not any(each.is_connected() for each in kept))
        assert (server.num_connections, server.num_requests) == (2, 2)


async def test_a_request_on_a_kept_connection_that_ends_is_sent_once_more_on_a_new_one() -> None:
    """Not on another kept one, which may have ended as well."""
    both_wait = asyncio.Barrier(2)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if server.num_requests == 3:
            raise ConnectionError("as planned")
        if server.num_requests < 3:
            await both_wait.wait()
        writer.write(WHOLE)

    async def ask() -> None:
        with await open_answer(client, server.url, b"{}", {}, stream=False, max_bytes=MAX_BYTES) as opened:
            assert opened.first == b"{}"

    async with serving(answer) as (server, client):
        await asyncio.gather(ask(), ask())
        await ask()
        assert (server.num_connections, server.num_requests) == (3, 4)


async def test_an_instance_that_ends_with_a_request_on_a_kept_connection_has_broken_off() -> None:
    """The new connection is refused: the instance is gone, and it had the request."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if server.num_requests == 2:
            server.stop()
            raise ConnectionError("as planned")
        writer.write(WHOLE)

    async with serving(answer) as (server, client):
        (await open_answer(client, server.url, b"{}", {}, stream=False, max_bytes=MAX_BYTES)).close()
        with pytest.raises(BrokenOffError):
            await open_answer(client, server.url, b"{}", {}, stream=False, max_bytes=MAX_BYTES)
        with pytest.raises(UnreachableError) as refused:
            await open_answer(client, server.url, b"{}", {}, stream=False, max_bytes=MAX_BYTES)
        assert not isinstance(refused.value, BrokenOffError)
        assert (server.num_connections, server.num_requests) == (1, 2)


async def test_a_request_is_sent_no_third_time() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if server.num_requests > 1:
            raise ConnectionError("as planned")
        writer.write(WHOLE)

    async with serving(answer) as (server, client):
        (await open_answer(client, server.url, b"{}", {}, stream=False, max_bytes=MAX_BYTES)).close()
        with pytest.raises(BrokenOffError):
            await open_answer(client, server.url, b"{}", {}, stream=False, max_bytes=MAX_BYTES)
        assert server.num_requests == 3


@pytest.mark.parametrize("status", [500, 503])
async def test_a_connection_whose_answer_is_5xx_is_not_used_again(status: int) -> None:
    """uvicorn closes it a moment later, where the application has raised."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d No\r\nContent-Length: 2\r\n\r\n{}" % status)

    async with serving(answer) as (server, client):
        for _ in range(2):
            with pytest.raises((RequestError, UnreachableError)):
                await open_answer(client, server.url, b"{}", {}, stream=False, max_bytes=MAX_BYTES)
        assert (server.num_connections, server.num_requests) == (2, 2)


async def test_neither_redirects_nor_cookies_nor_compression() -> None:
    head = b"HTTP/1.1 %b\r\nSet-Cookie: a=b\r\nLocation: /other\r\nContent-Encoding: gzip\r\n"
    answers = [b"307 Go", b"200 OK"]

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head % answers[server.num_requests - 1] + b"Content-Length: 2\r\n\r\n{}")

    async with serving(answer) as (server, client):
        with pytest.raises(Exception, match="the model failed"):
            await open_answer(client, server.url, b"{}", {}, stream=False, max_bytes=MAX_BYTES)
        with await open_answer(client, server.url, b"{}", {}, stream=False, max_bytes=MAX_BYTES) as opened:
            assert opened.first == b"{}"
        assert b"cookie" not in server.heads[1].lower()


async def test_one_that_drains_is_known_as_such() -> None:
    answer = b"HTTP/1.1 503 No\r\nX-Triptych-Draining: 1\r\nContent-Length: 2\r\n\r\n{}"
    async with serving(sends(answer)) as (server, client):
        with pytest.raises(DrainingError):
            await open_answer(client, server.url, b"{}", {}, stream=True, max_bytes=MAX_BYTES)


@pytest.mark.parametrize("part", [b"", b"HTTP/1.1 200 OK\r\nContent-Type: te", STREAM + b"10\r\ndata"])
async def test_a_request_that_is_given_up_closes_its_connection(part: bytes) -> None:
    """However slow the answer's headers are: the caller's deadline ends the wait."""
    sent = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(part)
        sent.set()
        await reader.read()

    async with serving(answer) as (server, client):
        asking = asyncio.ensure_future(
            open_answer(client, server.url, b"{}", {}, stream=True, max_bytes=MAX_BYTES)
        )
        await sent.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: server.num_closed == 1)


async def test_an_answer_that_is_not_read_is_not_taken_in() -> None:
    """What lies between the two are the kernel's buffers: some megabytes."""
    num_sent = 0

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        writer.write(STREAM + framed(EVENT))
        while num_sent < 64 << 20:
            writer.write(framed(b"data: " + b"x" * READ_AHEAD_BYTES + b"\n\n"))
            await writer.drain()
            num_sent += READ_AHEAD_BYTES

    async with serving(answer) as (server, client):
        with await open_answer(client, server.url, b"{}", {}, stream=True, max_bytes=MAX_BYTES):
            before = -1
            while num_sent != before:
                before = num_sent
                await asyncio.sleep(0.3)
            assert num_sent < 32 << 20
