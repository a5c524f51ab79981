"""HTTP by hand: what is no proper request is refused in OpenAI's format, within bounds of bytes and time."""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.samples import MODEL
from tests.support.gateway.system import System
from tests.support.waiting import until
from triptych_gateway import http_protocol

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}]}).encode()
STREAMED = json.dumps(
    {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
).encode()
LIVE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
LIMIT_S = 60.0


@asynccontextmanager
async def connection(system: System) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.settings.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            pass  # the gateway closed it with bytes of ours unread


async def answer_to(system: System, *pieces: bytes) -> bytes:
    """Everything that comes back until the gateway closes."""
    async with connection(system) as (reader, writer), asyncio.timeout(LIMIT_S):
        for piece in pieces:
            writer.write(piece)
        return await read_all(reader)


async def read_all(reader: asyncio.StreamReader) -> bytes:
    answer = b""
    try:
        while chunk := await reader.read(1 << 16):
            answer += chunk
    except ConnectionError:
        pass  # closed with bytes of ours unread: what came before counts
    return answer


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert b"connection: close" in head.lower()
    return int(head.split(b" ")[1]), error["code"]


def post(*headers: bytes) -> bytes:
    return HEAD + b"".join(header + b"\r\n" for header in headers) + b"\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
        b"FETCH / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        post(b"Content-Length: -1"),
        post(b"Content-Length: five"),
        post(b"Content-Length: 99999999999999999999999"),
        post(b"Content-Length: 5", b"Content-Length: 6"),
        post(b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        post(b"Transfer-Encoding: chunked") + b"zz\r\n",
        post(b"bad header"),
        post(b"X: a\x00b"),
    ],
)
async def test_what_is_no_http(system: System, request_bytes: bytes) -> None:
    assert error_of(await answer_to(system, request_bytes)) == (400, "invalid_http")
    assert (await system.ask("still there")).choices


@pytest.mark.parametrize(
    "pieces",
    [
        (HEAD + b"X: " + b"a" * 200_000,),
        (HEAD, *[b"X: " + b"a" * 1000 + b"\r\n"] * 200),
        (b"GET /" + b"a" * 200_000,),
        (post(b"Transfer-Encoding: chunked"), b"1;" + b"a" * 200_000),
        (post(b"Transfer-Encoding: chunked") + b"0\r\n", *[b"X: " + b"a" * 1000 + b"\r\n"] * 200),
        (LIVE[:-2] + b"X: " + b"a" * 100_000 + b"\r\n\r\n",),
        (LIVE[:-2] + b"X: a\r\n" * 20_000 + b"\r\n",),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",),
        (post(b"Transfer-Encoding: chunked") + b"0\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",),
    ],
    ids=[
        "one value",
        "many headers",
        "path",
        "chunk extension",
        "trailers",
        "one value, whole",
        "many headers, whole",
        "path, whole",
        "trailers, whole",
    ],
)
@pytest.mark.parametrize("system", [{"header_timeout_s": 60.0}], indirect=True)
async def test_headers_are_bounded(system: System, pieces: tuple[bytes, ...]) -> None:
    assert error_of(await answer_to(system, *pieces)) == (431, "headers_too_large")


@pytest.mark.parametrize("system", [{"header_timeout_s": 60.0}], indirect=True)
async def test_small_chunks_are_no_header_flood(system: System) -> None:
    long = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x" * 20_000}]}).encode()
    pieces = b"".join(b"1\r\n" + long[at : at + 1] + b"\r\n" for at in range(len(long))) + b"0\r\n\r\n"
    answer = await answer_to(system, post(b"Transfer-Encoding: chunked", b"Connection: close") + pieces)
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("system", [{"header_timeout_s": 0.3, "body_timeout_s": 0.3}], indirect=True)
async def test_slow_clients(system: System) -> None:
    """A head, and a body, that never end; and a client that sends nothing at all."""
    assert error_of(await answer_to(system, b"GET / HTTP/1.1\r\nHost:")) == (408, "header_timeout")
    assert await answer_to(system) == b""
    async with connection(system) as (reader, writer), asyncio.timeout(LIMIT_S):
        writer.write(post(b"Content-Length: 100", b"Connection: close") + b"{")
        answer = await read_all(reader)
    assert error_of(answer) == (408, "body_timeout")
    async with connection(system) as (reader, writer), asyncio.timeout(LIMIT_S):
        writer.write(LIVE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"GET / HTTP/1.1\r\n")  # the next request of a connection is bounded too
        assert b'"header_timeout"' in await read_all(reader)


@pytest.mark.parametrize("system", [{"body_piece_timeout_s": 1.0}], indirect=True)
async def test_a_body_whose_next_piece_does_not_come(system: System) -> None:
    """Each piece begins the time anew: a body that comes slowly is served."""
    async with connection(system) as (reader, writer), asyncio.timeout(LIMIT_S):
        writer.write(post(b"Content-Length: %d" % len(BODY)))
        for at in range(0, len(BODY), 8):
            writer.write(BODY[at : at + 8])
            await asyncio.sleep(0.15)  # in all more than the limit
        assert b"HTTP/1.1 200 OK\r\n" in await reader.readuntil(b"\r\n\r\n")
    answer = await answer_to(system, post(b"Content-Length: 100", b"Connection: close") + b"{")
    assert error_of(answer) == (408, "body_timeout")


@pytest.mark.parametrize("pieces", [(LIVE[:-2],), (post(b"Transfer-Encoding: chunked") + b"0\r\n",)])
async def test_the_number_of_headers_is_bounded(system: System, pieces: tuple[bytes, ...]) -> None:
    """Far below the bound on their bytes; in the head, and behind a body."""
    lines = b"X: a\r\n" * http_protocol.MAX_HEADERS
    assert error_of(await answer_to(system, *pieces, lines, b"\r\n")) == (431, "headers_too_large")
    async with connection(system) as (reader, writer), asyncio.timeout(LIMIT_S):
        writer.write(LIVE[:-2] + b"X: a\r\n" * (http_protocol.MAX_HEADERS - 1) + b"\r\n")  # and `Host`
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"


# ---- clients that do not read ---------------------------------------------------------------------
def unread(system: System, request_bytes: bytes) -> socket.socket:
    """A connection whose answers stay where they are."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", system.gateway.settings.port))
    client.sendall(request_bytes)
    return client


def connections_of(system: System, client: socket.socket) -> list[Any]:
    """The gateway's side of `client`, while it has one."""
    port = client.getsockname()[1]
    connections: set[Any] = set(system.server.server_state.connections)
    return [each for each in connections if each.client == ("127.0.0.1", port)]


@pytest.mark.parametrize("system", [{"chunk_timeout_s": 0.5}], indirect=True)
async def test_a_stream_that_nobody_reads_is_aborted(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """At prefill_decode too, and nothing of the connection stays."""
    monkeypatch.setattr(FakePrefillDecode, "_text", lambda self, body: " ".join(["x" * 50_000] * 1000))
    with unread(system, post(b"Content-Length: %d" % len(STREAMED)) + STREAMED) as client:
        await until(lambda: connections_of(system, client) and system.prefill_decode.bodies)
        await until(lambda: not connections_of(system, client), LIMIT_S)
        await until(lambda: system.prefill_decode.num_disconnects == 1)
    assert b'status="499"} 1.0' in system.gateway.services.metrics.metrics.render()


@pytest.mark.parametrize("system", [{"chunk_timeout_s": 0.5}], indirect=True)
async def test_answers_that_have_ended_do_not_stay_unread(system: System) -> None:
    """They lie in buffers, and no request stands behind them any more."""
    with unread(system, b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 16) as client:
        await until(lambda: connections_of(system, client))

        def is_closed_or_asked_again() -> bool:
            with contextlib.suppress(ConnectionError):
                client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")  # until buffers are full
            return not connections_of(system, client)

        await until(is_closed_or_asked_again, LIMIT_S)


async def test_requests_sent_ahead_are_bounded(system: System) -> None:
    """Each would cost memory until its turn, and the client reads no answer meanwhile."""
    system.prefill_decode.behaviour = "hang"
    first = post(b"Content-Length: %d" % len(BODY)) + BODY
    assert await answer_to(system, first + LIVE * 1000) == b""
    system.prefill_decode.release.set()


async def test_a_few_requests_sent_ahead_are_served(system: System) -> None:
    async with connection(system) as (reader, writer), asyncio.timeout(LIMIT_S):
        writer.write(LIVE * 5)
        answers = b""
        while len(re.findall(rb"HTTP/1\.1 200", answers)) < 5:
            answers += await reader.read(1 << 16)


async def test_garbage_behind_a_stream_does_not_get_into_it(system: System) -> None:
    system.prefill_decode.behaviour = "stall"
    async with connection(system) as (reader, writer), asyncio.timeout(LIMIT_S):
        writer.write(post(b"Content-Length: %d" % len(STREAMED)) + STREAMED)
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"no request at all\r\n\r\n")
        answer += await read_all(reader)
    assert answer.count(b"HTTP/1.1") == 1
    system.prefill_decode.release.set()
    await until(lambda: not system.gateway.services.access.limiter.num_requests)


# ---- ahead of an answer, and behind one -----------------------------------------------------------
async def let_header_timeout_pass(system: System) -> None:
    """A timer that runs already has fired when that of a younger connection has."""
    assert error_of(await answer_to(system, b"GET /")) == (408, "header_timeout")


@pytest.mark.parametrize("system", [{"header_timeout_s": 0.3}], indirect=True)
@pytest.mark.parametrize("ahead", [b"\r\n", b"\r\n" * 5, b"GET /health"])
async def test_what_comes_ahead_does_not_end_the_answer(system: System, ahead: bytes) -> None:
    """An empty line (RFC 9112, 2.2), and the beginning of the next request."""
    system.prefill_decode.behaviour = "hang"
    async with connection(system) as (reader, writer), asyncio.timeout(LIMIT_S):
        writer.write(post(b"Content-Length: %d" % len(BODY)) + BODY)
        await until(lambda: system.prefill_decode.bodies)
        writer.write(ahead)
        await let_header_timeout_pass(system)
        system.prefill_decode.release.set()
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
        rest = await read_all(reader)
    assert (b'"header_timeout"' in rest) == (not ahead.isspace())


@pytest.mark.parametrize("system", [{"header_timeout_s": 0.3}], indirect=True)
async def test_the_rest_of_a_head_may_come_behind_the_answer(system: System) -> None:
    system.prefill_decode.behaviour = "hang"
    async with connection(system) as (reader, writer), asyncio.timeout(LIMIT_S):
        writer.write(post(b"Content-Length: %d" % len(BODY)) + BODY)
        await until(lambda: system.prefill_decode.bodies)
        writer.write(b"\r\n" + LIVE[:20])
        await let_header_timeout_pass(system)
        writer.write(LIVE[20:])
        system.prefill_decode.release.set()
        answers = b""
        while len(re.findall(rb"HTTP/1\.1 200", answers)) < 2:
            answers += await reader.read(1 << 16)


@pytest.mark.parametrize("system", [{"header_timeout_s": 0.3}], indirect=True)
async def test_empty_lines_do_not_hold_a_connection(system: System) -> None:
    async with connection(system) as (reader, writer), asyncio.timeout(LIMIT_S):
        writer.write(LIVE)
        await reader.readuntil(b"}")
        writer.write(b"\r\n")
        assert await read_all(reader) == b""


POST_TO_GET_ROUTE = LIVE[:-2].replace(b"GET", b"POST")


@pytest.mark.parametrize("system", [{"header_timeout_s": 0.3}], indirect=True)
async def test_a_body_behind_its_answer_does_not_hold_the_connection(system: System) -> None:
    async with connection(system) as (reader, writer), asyncio.timeout(LIMIT_S):
        writer.write(POST_TO_GET_ROUTE + b"Content-Length: 1000\r\n\r\n")
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 405 Method Not Allowed\r\n"
        writer.write(b"x")
        assert b'"method_not_allowed"' in await read_all(reader)


async def write_chunks(writer: asyncio.StreamWriter, number: int) -> None:
    for _ in range(number):
        writer.write(b"10000\r\n" + b"x" * (1 << 16) + b"\r\n")
        await writer.drain()


@pytest.mark.parametrize("system", [{"header_timeout_s": 60.0}], indirect=True)
async def test_a_body_behind_its_answer_ends(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_UNREAD_BYTES", 1 << 20)
    async with connection(system) as (reader, writer), asyncio.timeout(LIMIT_S):
        writer.write(POST_TO_GET_ROUTE + b"Transfer-Encoding: chunked\r\n\r\n")
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 405 Method Not Allowed\r\n"
        with pytest.raises(ConnectionError):
            await write_chunks(writer, 1000)


@pytest.mark.parametrize("system", [{"header_timeout_s": 0.3}], indirect=True)
async def test_a_connection_goes_on_when_the_body_ends_behind_its_answer(system: System) -> None:
    async with connection(system) as (reader, writer), asyncio.timeout(LIMIT_S):
        writer.write(POST_TO_GET_ROUTE + b"Content-Length: 1000\r\n\r\n")
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 405 Method Not Allowed\r\n"
        await reader.readuntil(b"}")
        writer.write(b"x" * 1000)
        await let_header_timeout_pass(system)
        writer.write(LIVE)
        assert b"HTTP/1.1 200 OK\r\n" in await reader.readuntil(b"\r\n\r\n")


@pytest.mark.parametrize("host", [b"[", b"a b", b"\xff", b"", b"x" * 1000])
async def test_any_host_header(system: System, host: bytes) -> None:
    answer = await answer_to(
        system, b"GET /nothing HTTP/1.1\r\nConnection: close\r\nHost: " + host + b"\r\n\r\n"
    )
    assert error_of(answer) == (404, "not_found")
