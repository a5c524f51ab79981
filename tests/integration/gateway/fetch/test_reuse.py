"""One download for all who want a URL at once, and none where the answer still holds."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.gateway.fetching import PATH, code_of, fetch, fetching, outcomes, refusal
from tests.support.gateway.media_server import (
    Answer,
    Asked,
    MediaServer,
    answering,
    hanging,
    head,
    in_turn,
    redirecting,
)
from tests.support.waiting import until
from triptych_common.domain.errors import RequestError
from triptych_gateway.fetch.fetcher import MediaFetcher

FRESH = {"Cache-Control": "max-age=60"}
DATE = "Sun, 06 Nov 1994 08:49:37 GMT"


class HeldAnswer:
    """An image that comes once the test releases it."""

    def __init__(self, body: bytes = b"x") -> None:
        self.release = asyncio.Event()
        self._answer = answering(body=body)

    async def __call__(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        await self.release.wait()
        await self._answer(asked, writer)


@pytest.fixture
def tasks() -> Iterator[list[asyncio.Task[bytes]]]:
    started: list[asyncio.Task[bytes]] = []
    yield started
    assert all(task.done() for task in started)


def start(fetcher: MediaFetcher, url: str, salt: str = "", limit_s: float = 10.0) -> asyncio.Task[bytes]:
    return asyncio.get_running_loop().create_task(fetch(fetcher, url, salt=salt, limit_s=limit_s))


async def test_one_download_for_all(server: MediaServer) -> None:
    held = server.answers["/a"] = HeldAnswer(b"abc")
    async with fetching() as fetcher:
        waiting = [start(fetcher, server.url("/a#part")) for _ in range(50)]
        await until(lambda: server.asked)
        waiting += [start(fetcher, server.url("/a").upper().replace("/A", "/a")) for _ in range(50)]
        await asyncio.sleep(0)
        held.release.set()
        contents = await asyncio.gather(*waiting)
        assert contents == [b"abc"] * 100
        assert all(each is contents[0] for each in contents)
        assert not fetcher.downloads
        assert outcomes(fetcher) == {"fetched": 1, "joined": 99}
    assert len(server.asked) == 1


async def test_tenants_share_no_download_and_no_answer(server: MediaServer) -> None:
    held = server.answers["/a"] = HeldAnswer()
    server.answers["/kept"] = answering(body=b"k", headers=FRESH)
    async with fetching() as fetcher:
        waiting = [start(fetcher, server.url("/a"), salt) for salt in ("", "red", "blue", "red")]
        await until(lambda: len(server.asked) == 3)
        held.release.set()
        await asyncio.gather(*waiting)
        server.asked.clear()
        for salt in ("red", "red", "blue", "", "blue", "red"):
            assert await fetch(fetcher, server.url("/kept"), salt=salt) == b"k"
    assert len(server.asked) == 3


async def test_one_that_leaves_takes_nothing_from_the_others(
    server: MediaServer, tasks: list[asyncio.Task[bytes]]
) -> None:
    held = server.answers["/a"] = HeldAnswer()
    async with fetching() as fetcher:
        first, second, third = (start(fetcher, server.url("/a")) for _ in range(3))
        tasks += [first, second, third]
        await until(lambda: server.asked)
        first.cancel()
        second.cancel()
        await asyncio.wait({first, second})
        assert (first.cancelled(), third.done(), server.num_open) == (True, False, 1)
        held.release.set()
        assert await third == b"x"
        assert outcomes(fetcher) == {"left": 2, "joined": 1}
    assert len(server.asked) == 1


async def test_when_all_have_left_it_ends(server: MediaServer, tasks: list[asyncio.Task[bytes]]) -> None:
    server.answers["/a"] = in_turn(hanging, answering(body=b"new"))
    async with fetching() as fetcher:
        tasks += [start(fetcher, server.url("/a")) for _ in range(3)]
        await until(lambda: server.asked)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        # One that comes in the same moment does not wait for what is about to end.
        assert await fetch(fetcher, server.url("/a")) == b"new"
        await until(lambda: not fetcher.downloads)
    assert len(server.asked) == 2


async def test_each_waits_within_its_own_time(server: MediaServer) -> None:
    held = server.answers["/a"] = HeldAnswer()
    async with fetching() as fetcher:
        patient = start(fetcher, server.url("/a"))
        await until(lambda: server.asked)
        assert code_of(await refusal(fetcher, server.url("/a"), limit_s=0.1)) == (400, "media_fetch_timeout")
        assert code_of(await refusal(fetcher, server.url("/a"), limit_s=-1.0)) == (400, "media_fetch_timeout")
        held.release.set()
        assert await patient == b"x"


async def test_one_that_comes_late_does_not_end_with_the_time_of_the_first(server: MediaServer) -> None:
    server.answers["/a"] = in_turn(hanging, answering(body=b"x"))
    async with fetching() as fetcher:
        first = asyncio.get_running_loop().create_task(refusal(fetcher, server.url("/a"), limit_s=0.3))
        await until(lambda: server.asked)
        late = start(fetcher, server.url("/a"))
        assert code_of(await first) == (400, "media_fetch_timeout")
        assert await late == b"x"


async def test_the_end_of_the_gateway(server: MediaServer) -> None:
    server.answers["/a"] = hanging
    async with fetching() as fetcher:
        waiting = start(fetcher, server.url("/a"))
        await until(lambda: server.asked)
    with pytest.raises(RequestError) as caught:
        await waiting
    assert code_of(caught.value) == (503, "draining")


async def test_each_books_its_own_bytes_and_one_that_may_not_leaves(server: MediaServer) -> None:
    release = asyncio.Event()

    async def halves(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, {"Content-Length": "2000"}) + bytes(1000))
        await release.wait()
        writer.write(bytes(1000))

    def refuse(num_bytes: int) -> None:
        if num_bytes > 1500:
            raise RequestError(429, "too_much_media", "too much")

    server.answers["/a"] = halves
    grown: list[int] = []
    async with fetching() as fetcher:
        url = fetcher.accept(server.url("/a"), PATH)
        deadline = asyncio.get_running_loop().time() + 10
        rich = asyncio.get_running_loop().create_task(fetcher.fetch(url, PATH, "", deadline, grown.append))
        poor = asyncio.get_running_loop().create_task(fetcher.fetch(url, PATH, "", deadline, refuse))
        await until(lambda: 1000 in grown)
        release.set()
        with pytest.raises(RequestError) as caught:
            await poor
        assert code_of(caught.value) == (429, "too_much_media")
        assert await rich == bytes(2000)
        assert outcomes(fetcher) == {"over_limit": 1, "fetched": 1}
    assert grown == sorted(grown)
    assert (grown[0], grown[-1]) == (0, 2000)


@pytest.mark.parametrize(
    ("headers", "num_asked", "how"),
    [
        (FRESH, 1, "cached"),
        ({}, 3, "fetched"),
        ({"Cache-Control": "no-store, max-age=60"}, 3, "fetched"),
        ({"Cache-Control": "max-age=60", "cache-control": "private"}, 3, "fetched"),
        ({"Cache-Control": "private, max-age=60", "ETag": '"v1"'}, 3, "fetched"),
        ({"Vary": "*", **FRESH}, 3, "fetched"),
    ],
)
async def test_what_may_be_used_again(
    server: MediaServer, headers: dict[str, str], num_asked: int, how: str
) -> None:
    server.answers["/a"] = answering(body=b"x", headers=headers)
    grown: list[int] = []
    async with fetching() as fetcher:
        for _ in range(3):
            assert await fetch(fetcher, server.url("/a"), on_growth=grown.append) == b"x"
        assert outcomes(fetcher) == ({"fetched": 3} if how == "fetched" else {"fetched": 1, how: 2})
    assert len(server.asked) == num_asked
    assert grown.count(1) == 3  # booked, wherever the bytes come from
    assert not any("if-none-match" in asked.headers for asked in server.asked)


def versioned(validators: dict[str, str], conditions: dict[str, str]) -> Answer:
    """304 to those who have this version, else it."""

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        shown = {name: value for name, value in asked.headers.items() if name.startswith("if-")}
        if shown == conditions:
            writer.write(head(304, {}))
        else:
            await answering(body=b"v1", headers=validators)(asked, writer)

    return answer


@pytest.mark.parametrize(
    ("validators", "conditions"),
    [
        ({"ETag": '"v1"'}, {"if-none-match": '"v1"'}),
        ({"Last-Modified": DATE}, {"if-modified-since": DATE}),
        ({"ETag": 'W/"v1"', "Last-Modified": DATE}, {"if-none-match": 'W/"v1"', "if-modified-since": DATE}),
        ({"ETag": '"v1"', "Cache-Control": "no-cache"}, {"if-none-match": '"v1"'}),
        ({"ETag": '"v1"', "Cache-Control": "max-age=60", "Age": "60"}, {"if-none-match": '"v1"'}),
    ],
)
async def test_asked_whether_it_still_holds(
    server: MediaServer, validators: dict[str, str], conditions: dict[str, str]
) -> None:
    server.answers["/a"] = versioned(validators, conditions)
    async with fetching() as fetcher:
        for _ in range(3):
            assert await fetch(fetcher, server.url("/a")) == b"v1"
        assert outcomes(fetcher) == {"fetched": 1, "revalidated": 2}
        server.answers["/a"] = answering(body=b"v2", headers={"ETag": '"v2"'})
        assert await fetch(fetcher, server.url("/a")) == b"v2"
        server.answers["/a"] = answering(404)
        assert code_of(await refusal(fetcher, server.url("/a"))) == (400, "media_fetch_failed")


async def test_a_redirect_is_asked_for_each_time(server: MediaServer) -> None:
    """What it leads to may be kept; where it leads may change."""
    server.answers |= {
        "/one": in_turn(redirecting("/a"), redirecting("/b")),
        "/a": answering(body=b"a", headers=FRESH),
        "/b": answering(body=b"b", headers=FRESH),
    }
    async with fetching() as fetcher:
        assert await fetch(fetcher, server.url("/one")) == b"a"
        assert await fetch(fetcher, server.url("/a")) == b"a"
        assert await fetch(fetcher, server.url("/one")) == b"b"
        assert await fetch(fetcher, server.url("/one")) == b"b"
    assert [asked.target for asked in server.asked] == ["/one", "/a", "/one", "/b", "/one"]


async def test_the_cache_may_be_off(server: MediaServer) -> None:
    server.answers["/a"] = answering(body=b"x", headers={**FRESH, "ETag": '"v1"'})
    async with fetching(fetch_cache_bytes=0) as fetcher:
        for _ in range(2):
            await fetch(fetcher, server.url("/a"))
    assert len(server.asked) == 2
