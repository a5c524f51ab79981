"""Servers that are slow, endless, compressed, or lie: each costs what its bounds allow, and no more."""

import asyncio
import gzip
import socket
import time
from ipaddress import ip_network
from typing import Any

import pytest

from tests.support.gateway.fetching import code_of, fetch, fetching, outcomes, refusal
from tests.support.gateway.media_server import (
    SERVED,
    Answer,
    MediaServer,
    answering,
    hanging,
    head,
    in_turn,
    redirecting,
    repeating,
    resetting,
    sending,
)
from tests.support.waiting import until

FAILED, TIMEOUT, TOO_LARGE = (
    (400, "media_fetch_failed"),
    (400, "media_fetch_timeout"),
    (413, "media_too_large"),
)
OK = head(200, {})
LENGTH_9 = head(200, {"Content-Length": "9"})
CHUNKED = head(200, {"Transfer-Encoding": "chunked"})
BOMB = gzip.compress(bytes(10 << 20))

# name: (answer, status and code, attempts)
ANSWERS: dict[str, tuple[Answer, tuple[int, str], int]] = {
    "a body by drips": (repeating(OK, b"x", 0.02), TIMEOUT, 1),
    "headers by drips": (repeating(b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.02), TIMEOUT, 1),
    "1xx for ever": (repeating(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n", 0.02), TIMEOUT, 1),
    "no answer": (hanging, TIMEOUT, 2),
    "an endless body": (repeating(OK, bytes(10_000)), TOO_LARGE, 1),
    "an endless chunked body": (repeating(CHUNKED, b"2710\r\n" + bytes(10_000) + b"\r\n"), TOO_LARGE, 1),
    "an endless chunk": (repeating(CHUNKED + b"7fffffff\r\n", bytes(10_000)), TOO_LARGE, 1),
    "a large length": (sending(head(200, {"Content-Length": "100001"})), TOO_LARGE, 1),
    "a huge length": (sending(head(200, {"Content-Length": "9" * 18})), TOO_LARGE, 1),
    "one byte too many": (answering(body=bytes(100_001)), TOO_LARGE, 1),
    "an endless header": (repeating(b"HTTP/1.1 200 OK\r\nX: ", b"x" * 1000), FAILED, 1),
    "an endless status line": (repeating(b"HTTP/1.1 200 ", b"x" * 1000), FAILED, 1),
    "headers without end": (repeating(b"HTTP/1.1 200 OK\r\n", b"X: " + b"x" * 1000 + b"\r\n"), FAILED, 1),
    "large headers": (answering(headers={f"X-{n}": "x" * 1000 for n in range(30)}), FAILED, 1),
    "gzip": (answering(body=BOMB[:9000], headers={"Content-Encoding": "gzip"}), FAILED, 1),
    "gzip twice": (answering(headers={"Content-Encoding": "gzip, gzip"}), FAILED, 1),
    "brotli": (answering(headers={"Content-Encoding": "br"}), FAILED, 1),
    "deflate": (answering(headers={"content-encoding": "Identity,DEFLATE"}), FAILED, 1),
    "cut off": (sending(head(200, {"Content-Length": "1000"}) + b"half"), FAILED, 2),
    "cut off in a chunk": (sending(CHUNKED + b"ff\r\nhalf"), FAILED, 2),
    "cut off in the head": (sending(b"HTTP/1.1 200 OK\r\nCont"), FAILED, 2),
    "a negative length": (sending(head(200, {"Content-Length": "-1"}) + b"x"), FAILED, 1),
    "no length": (sending(head(200, {"Content-Length": "0x10"}) + b"x"), FAILED, 1),
    "two lengths": (
        sending(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxy"),
        FAILED,
        1,
    ),
    "length and chunks": (
        sending(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nxy"),
        FAILED,
        1,
    ),
    "no chunks": (sending(CHUNKED + b"zz\r\nx"), FAILED, 1),
    "no HTTP": (sending(b"SSH-2.0-OpenSSH_9.6\r\n"), FAILED, 1),
    "HTTP/0.9": (sending(b"\x89PNG\r\n\x1a\n" + bytes(100)), FAILED, 1),
    "closed": (sending(b""), FAILED, 2),
    "reset": (resetting, FAILED, 2),
    "404": (answering(404), FAILED, 1),
    "403": (answering(403), FAILED, 1),
    "206": (answering(206, b"part"), FAILED, 1),
    "204": (answering(204), FAILED, 1),
    "304 unasked": (sending(head(304, {})), FAILED, 1),
    "a redirect to nowhere": (answering(302), FAILED, 1),
    "300": (redirecting("/a.png", 300), FAILED, 1),
    "500": (answering(500), FAILED, 2),
    "503": (answering(503), FAILED, 2),
    "429": (answering(429), FAILED, 2),
    "429 for an hour": (answering(429, headers={"Retry-After": "3600"}), FAILED, 1),
}


UNREACHED: dict[str, Any] = {"fetch_max_attempts": 2, "fetch_connect_timeout_s": 0.2}


@pytest.mark.parametrize("num_redirects", [0, 2])
@pytest.mark.parametrize("name", ANSWERS)
async def test_its_bounds_hold(server: MediaServer, name: str, num_redirects: int) -> None:
    """The same whether it is asked itself, or at the end of a chain; each attempt follows all of it."""
    answer, expected, num_attempts = ANSWERS[name]
    server.answers["/private"] = answer
    url = server.url("/private?signature=x")
    grown: list[int] = []
    limits = {"fetch_timeout_s": 0.6, "fetch_chunk_timeout_s": 0.2} if expected == TIMEOUT else {}
    async with fetching(fetch_max_attempts=2, **limits) as fetcher:  # whatever else it comes to takes no time
        began = time.monotonic()
        asked = server.leading_to(url) if num_redirects else url
        error = await refusal(fetcher, asked, on_growth=grown.append)
        assert code_of(error) == expected, error.message
        assert time.monotonic() - began < 60
        assert server.num_connections == num_attempts * (1 + num_redirects)
        await until(lambda: not fetcher.downloads)
        if answer is not hanging:
            await until(lambda: not server.num_open)  # the connection was closed, whatever it still sent
    assert max(grown, default=0) <= 100_000
    assert sum(outcomes(fetcher).values()) == 1


@pytest.mark.parametrize(
    ("answers", "body"),
    [
        ([answering(503), answering(body=b"x")], b"x"),
        ([answering(429, headers={"Retry-After": "0"}), answering(body=b"x")], b"x"),
        ([resetting, resetting, answering(body=b"x")], b"x"),
        ([sending(LENGTH_9 + b"half"), answering(body=b"x")], b"x"),
        ([hanging, answering(body=b"x")], b"x"),
        ([redirecting("/private"), answering(502), answering(body=b"x")], b"x"),
        ([sending(OK + b"until the end")], b"until the end"),
        ([sending(CHUNKED + b"3\r\nabc\r\n0\r\n\r\n")], b"abc"),
        ([answering(body=b"", headers={"Content-Encoding": "identity"})], b""),
        ([answering(body=bytes(100_000))], bytes(100_000)),
        ([sending(b"HTTP/1.1 103 Early Hints\r\n\r\n" + LENGTH_9 + b"123456789")], b"123456789"),
        ([answering(body=b"x", headers={"Content-Type": "text/html"})], b"x"),
    ],
)
async def test_what_can_be_had_is_had(server: MediaServer, answers: list[Answer], body: bytes) -> None:
    server.answers["/private"] = in_turn(*answers)
    async with fetching(fetch_chunk_timeout_s=0.2) as fetcher:
        assert await fetch(fetcher, server.url("/private")) == body
    assert len(server.asked) == len(answers)


async def test_what_a_server_is_told(server: MediaServer) -> None:
    """No cookie, no referrer, nothing of the caller's."""
    server.answers["/one"] = answering(302, headers={"Location": "/a.png", "Set-Cookie": "a=b"})
    async with fetching() as fetcher:
        await fetch(fetcher, server.url("/one?signature=x#part"))
        await fetch(fetcher, server.url("/a.png"))
    assert [asked.target for asked in server.asked] == ["/one?signature=x", "/a.png", "/a.png"]
    for asked in server.asked:
        assert asked.headers == {
            "host": f"{SERVED}:{server.port}",
            "user-agent": "Triptych",
            "accept": "*/*",
            "accept-encoding": "identity",
            "connection": "close",
        }


async def test_a_server_that_cannot_be_reached(server: MediaServer) -> None:
    """A port that refuses, and one that takes no connection."""
    with socket.socket() as closed:
        closed.bind((SERVED, 0))
        async with fetching(
            fetch_max_attempts=2, fetch_connect_timeout_s=0.2, fetch_timeout_s=0.6
        ) as fetcher:
            url = f"http://{SERVED}:{closed.getsockname()[1]}/"
            for asked in (url, server.leading_to(url)):
                assert code_of(await refusal(fetcher, asked)) == FAILED
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind((SERVED, 0))
        full.listen(0)
        for each in (first, second):
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        async with fetching(
            fetch_max_attempts=2, fetch_connect_timeout_s=0.2, fetch_timeout_s=1.0
        ) as fetcher:
            url = f"http://{SERVED}:{full.getsockname()[1]}/"
            for asked in (url, server.leading_to(url)):
                began = time.monotonic()
                assert code_of(await refusal(fetcher, asked)) == TIMEOUT
                assert time.monotonic() - began < 60


async def test_slow_servers_keep_no_place_beyond_their_time(server: MediaServer) -> None:
    """All places of one host are taken: another host is served, and those that wait are told in time."""
    server.answers["/slow"] = hanging
    bounds: dict[str, Any] = {
        "fetch_max_per_host": 2,
        "fetch_max_in_flight": 3,
        "fetch_timeout_s": 3.0,
        "fetch_chunk_timeout_s": 10.0,
    }
    async with (
        MediaServer(host="127.0.0.3", answers={"/": answering(body=b"x")}).running() as other,
        fetching(fetch_allowed_networks=(ip_network("127.0.0.2/31"),), **bounds) as fetcher,
    ):
        loop = asyncio.get_running_loop()
        slow = [loop.create_task(refusal(fetcher, server.url(f"/slow?{n}"))) for n in range(2)]
        await until(lambda: server.num_open == 2)
        waiting = [refusal(fetcher, server.url(f"/slow?{n}"), limit_s=0.2) for n in range(2, 5)]
        assert await fetch(fetcher, other.url()) == b"x"
        assert [code_of(each) for each in await asyncio.gather(*waiting)] == [(503, "fetch_busy")] * 3
        assert [code_of(await each) for each in slow] == [TIMEOUT] * 2
    assert len(server.asked) == 2
