"""Requests whose images are named by URL, through a real gateway."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import ClientSession, TCPConnector
from opentelemetry.sdk.trace import ReadableSpan

from tests.support.gateway.media_server import (
    SERVED,
    Asked,
    MediaServer,
    answering,
    hanging,
    head,
    repeating,
    resetting,
)
from tests.support.gateway.samples import MODEL, data_url, image_bytes
from tests.support.gateway.spans import exported_spans
from tests.support.gateway.system import System, opened_system
from tests.support.hostile.chunks import jpeg_that_is_fli
from tests.support.waiting import until

NUM_AT_ONCE = 500
AT_ONCE = {  # test, gateway and fakes share one event loop
    "max_requests_in_flight": NUM_AT_ONCE,
    "first_token_timeout_s": 60.0,
    "fetch_timeout_s": 60.0,
    "connect_timeout_s": 60.0,
}
SEED = 12
DEADLINE_S = 60.0


@pytest.fixture
async def system(
    redis_url: str, tmp_path: Path, server: MediaServer, request: pytest.FixtureRequest
) -> AsyncIterator[System]:
    """May fetch from `server`."""
    settings = {
        "fetch_allowed_networks": (f"{SERVED}/32",),
        "fetch_allowed_ports": (server.port,),
        **getattr(request, "param", {}),
    }
    async with opened_system(redis_url, tmp_path, **settings) as opened:
        yield opened


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*content: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": list(content)}]}


def uuids(system: System, at: int = -1) -> list[str]:
    return [part["uuid"] for part in system.prefill_decode.bodies[at]["messages"][0]["content"]]


def param(at: int) -> str:
    return f"messages[0].content[{at}].image_url.url"


async def test_the_same_bytes_are_one_item_whatever_way_they_came(
    system: System, server: MediaServer
) -> None:
    urls = [server.url("/a.png"), data_url(image_bytes(7)), server.url("/a.png?again")]
    for url in urls:
        assert (await system.ask([image(url)])).choices[0].message.content.startswith("1x8x8")
    assert len({uuid for at in range(3) for uuid in uuids(system, at)}) == 1
    assert len(system.encoder.jobs) == 1
    await system.ask([image(url) for url in urls])
    assert len(set(uuids(system))) == 1


async def test_images_of_one_request_are_fetched_at_once_and_stay_in_order(
    system: System, server: MediaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer waits until all four were asked for; the last comes first."""
    done: list[int] = []

    def answer(index: int) -> Any:
        async def when_all_are_asked(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await until(lambda: len(server.asked) == 4 and len(done) == 3 - index)
            await answering(body=image_bytes(index, (8 + index, 8)))(asked, writer)
            done.append(index)

        return when_all_are_asked

    server.answers |= {f"/{index}": answer(index) for index in range(4)}
    inline = image(data_url(image_bytes(9, (20, 8))))
    with exported_spans(monkeypatch) as spans:
        urls = [image(server.url(f"/{index}?signature=secret")) for index in range(4)]
        answered = await system.ask([*urls[:2], inline, *urls[2:]])
        await system.assert_idle()
    assert answered.choices[0].message.content.startswith("1x8x8 1x8x9 1x8x20 1x8x10 1x8x11 ")
    assert done == [3, 2, 1, 0]
    fetches: list[ReadableSpan] = [
        each for each in spans.get_finished_spans() if each.name == "gateway.fetch"
    ]
    assert len(fetches) == 4
    latest_start = max(each.start_time or 0 for each in fetches)
    assert all((each.end_time or 0) > latest_start for each in fetches)
    for each in fetches:
        assert (
            dict(each.attributes or {}).items()
            >= {"triptych.host": SERVED, "triptych.outcome": "fetched"}.items()
        )
        assert "secret" not in each.to_json()


@pytest.mark.parametrize("system", [AT_ONCE], indirect=True)
async def test_one_url_in_many_requests_at_once(system: System, server: MediaServer) -> None:
    release = asyncio.Event()

    async def when_all_wait(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        await answering(body=image_bytes(7))(asked, writer)

    server.answers["/slow.png"] = when_all_wait
    body = chat(image(server.url("/slow.png")))

    async def ask(client: ClientSession) -> str:
        async with client.post("/v1/chat/completions", json=body) as answer:
            return str((await answer.json())["choices"][0]["message"]["content"])

    # httpx' pool takes a second of CPU for a hundred connections.
    async with (
        ClientSession(system.gateway.settings.local_urls[0], connector=TCPConnector(limit=0)) as client,
        asyncio.TaskGroup() as group,
    ):
        tasks = [group.create_task(ask(client)) for _ in range(NUM_AT_ONCE)]
        await until(lambda: system.gateway.services.access.limiter.num_requests == NUM_AT_ONCE, 20)
        release.set()
    assert {task.result() for task in tasks} == {"1x8x8 word0 word1 word2"}
    assert len(server.asked) == 1
    assert len(system.encoder.jobs) == 1


@pytest.mark.parametrize("system", [{"max_image_pixels": 10_000}], indirect=True)
async def test_what_came_is_checked_like_any_other(system: System, server: MediaServer) -> None:
    fli = jpeg_that_is_fli(image_bytes(image_format="JPEG"), 64)
    server.answers |= {
        "/text": answering(body=b"<html>", headers={"Content-Type": "image/png"}),
        "/none": answering(),
        "/two": answering(body=fli),
        "/large": answering(body=image_bytes(size=(101, 100))),
    }
    for path, status, code in [
        ("/text", 400, "invalid_image"),
        ("/none", 400, "invalid_image"),
        ("/two", 400, "invalid_image"),
        ("/large", 413, "image_too_large"),
        ("/missing", 400, "media_fetch_failed"),
    ]:
        answer = await system.post(chat("x", image(server.url(f"{path}?signature=secret"))))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param(1)), answer.text
        assert "secret" not in answer.text
    assert system.encoder.jobs == []


async def test_nothing_is_fetched_for_a_request_with_a_url_that_is_not_allowed(
    system: System, server: MediaServer, forbidden: MediaServer
) -> None:
    for url in (forbidden.url(), "http://169.254.169.254/", "ftp://example.org/", "file:///etc/passwd", "x"):
        answer = await system.post(chat(image(server.url("/a.png")), image(url)))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param(1))
        assert error["code"] in ("url_not_allowed", "invalid_image_url")
    assert server.asked == []


async def test_one_that_fails_ends_the_others(system: System, server: MediaServer) -> None:
    server.answers["/slow"] = repeating(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", 0.05)
    answer = await system.post(chat(image(server.url("/slow")), image(server.url("/missing"))))
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (
        "media_fetch_failed",
        param(1),
    )
    await until(lambda: not server.num_open)


@pytest.mark.parametrize("system", [{"max_media_in_flight_bytes": 400_000}], indirect=True)
async def test_fetched_bytes_are_booked_as_they_come(system: System, server: MediaServer) -> None:
    limiter = system.gateway.services.access.limiter
    release = asyncio.Event()

    async def in_two_parts(asked: Asked, writer: asyncio.StreamWriter) -> None:
        content = image_bytes(7) + bytes(300_000)  # what follows an image is no part of it
        writer.write(head(200, {"Content-Length": str(len(content))}) + content[:200_000])
        await release.wait()
        writer.write(content[200_000:])

    server.answers |= {"/one": in_two_parts, "/two": answering(body=image_bytes(8) + bytes(300_000))}
    async with asyncio.TaskGroup() as group:
        first = group.create_task(system.post(chat(image(server.url("/one")))))
        await until(lambda: 200_000 <= limiter.media_bytes < 210_000)
        second = await system.post(chat(image(server.url("/two"))))
        assert (second.status_code, second.json()["error"]["code"]) == (429, "too_much_media")
        await until(lambda: 200_000 <= limiter.media_bytes < 210_000)
        release.set()
    assert first.result().status_code == 200


@pytest.mark.parametrize("system", [{"first_token_timeout_s": 0.5, "fetch_timeout_s": 600.0}], indirect=True)
async def test_the_requests_own_deadline_counts(system: System, server: MediaServer) -> None:
    server.answers["/drip"] = repeating(head(200, {}), b"x", 0.05)
    began = time.monotonic()
    answer = await system.post(chat(image(server.url("/drip"))))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "media_fetch_timeout")
    assert time.monotonic() - began < 60
    await until(lambda: not server.num_open)


async def test_a_caller_that_goes_away_ends_its_fetch(system: System, server: MediaServer) -> None:
    server.answers["/slow"] = repeating(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", 0.05)
    with pytest.raises(httpx.ReadTimeout):
        await system.post(chat(image(server.url("/slow"))), timeout=0.3)
    await until(lambda: server.num_connections and not server.num_open)


@pytest.mark.parametrize(
    "system",
    [
        {
            "fetch_chunk_timeout_s": 1.0,
            "fetch_timeout_s": 30.0,
            "fetch_max_per_host": 64,
            "first_token_timeout_s": DEADLINE_S,
        }
    ],
    indirect=True,
)
async def test_a_server_that_fails_often(system: System, server: MediaServer) -> None:
    """Each request is answered rightly, or with one error that names its image, by its own deadline."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    answers = {"reset": resetting, "503": answering(503), "stall": hanging}

    async def flaky(asked: Asked, writer: asyncio.StreamWriter) -> None:
        (kind,) = rng.choices(["reset", "503", "stall", "good"], [20, 10, 10, 60])
        size = (8 + int(asked.target.removeprefix("/")), 8)
        await answers.get(kind, answering(body=image_bytes(3, size)))(asked, writer)

    async def ask(index: int) -> str:
        """What came of one request: "right", the code of its error, or all that came."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await system.post(chat("x", image(server.url(f"/{index}"))))
        except TimeoutError:
            return f"{index}: no answer by the deadline"
        if answer.status_code == 200:
            text = answer.json()["choices"][0]["message"]["content"]
            return "right" if text.startswith(f"1x8x{8 + index} ") else f"{index}: {answer.text}"
        error = answer.json()["error"]
        is_clear = answer.status_code == 400 and error["param"] == param(1) and param(1) in error["message"]
        return str(error["code"]) if is_clear else f"{index}: {answer.text}"

    num_requests = 60
    server.answers |= {f"/{index}": flaky for index in range(num_requests)}
    outcomes = Counter(await asyncio.gather(*map(ask, range(num_requests))))
    assert outcomes.keys() <= {"right", "media_fetch_failed", "media_fetch_timeout"}
    # Three attempts fail together in 6.4 % of all cases.
    assert outcomes["right"] >= num_requests * 0.8
    assert len(server.asked) > num_requests


@pytest.mark.parametrize("system", [{"fetch_urls": False}], indirect=True)
async def test_switched_off(system: System, server: MediaServer) -> None:
    answer = await system.post(chat(image(server.url("/a.png"))))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "remote_media_disabled")
    assert server.asked == []


async def test_files_below_the_root(redis_url: str, tmp_path: Path) -> None:
    root = tmp_path / "media"
    root.mkdir()
    (root / "a.png").write_bytes(image_bytes(7))
    async with opened_system(redis_url, tmp_path, fetch_file_root=root) as system:
        await system.ask([image(f"file://{root}/a.png"), image(data_url(image_bytes(7)))])
        assert len(set(uuids(system))) == 1
        answer = await system.post(chat(image(f"file://{tmp_path}/keys.toml")))
        assert answer.json()["error"]["code"] == "url_not_allowed"
