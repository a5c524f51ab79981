"""Bodies that are made to cost: what they cost is bounded, and the neighbours do not pay for them."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.support.gateway.samples import MODEL, data_url, image_bytes
from tests.support.gateway.system import System
from tests.support.waiting import until

TEXT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
MIB = 1 << 20


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def image_part(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content)}}


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def with_metadata(metadata: bytes) -> bytes:
    head = b'{"model":"' + MODEL.encode() + b'","messages":[{"role":"user","content":"x"}],"metadata":'
    return head + metadata + b"}"


@pytest.mark.parametrize(
    ("metadata", "status", "code"),
    [
        (b"[" + b"[]," * (63 * MIB // 3) + b"[]]", 413, "prompt_too_large"),
        (b"[" + b"[]," * MIB + b"[]]", 400, "body_too_complex"),
        (b"[" + b"1," * MIB + b"1]", 400, "body_too_complex"),
        (b"[" * 100_000 + b"]" * 100_000, 400, "body_too_complex"),
        (b'"' + b"x" * 5 * MIB + b'"', 413, "prompt_too_large"),
        (b'"data:' + "\U0001f600".encode() * (60 * MIB // 4) + b'"', 413, "prompt_too_large"),
        (b'{"data:' + b"x" * 5 * MIB + b'":1}', 413, "prompt_too_large"),
    ],
    ids=["60 MiB of lists", "3 MiB of lists", "numbers", "deep", "text", "four bytes each", "a key"],
)
async def test_a_body_that_costs_too_much(system: System, metadata: bytes, status: int, code: str) -> None:
    answer = await system.post(with_metadata(metadata))
    assert refusal(answer) == (status, code)
    assert system.prefill_decode.bodies == []
    assert (await system.ask("still there")).choices


@pytest.mark.parametrize("system", [{"max_image_pixels": 10_000_000}], indirect=True)
async def test_a_large_image_is_no_fault(system: System) -> None:
    content = image_bytes(size=(4000, 1000), image_format="BMP")
    assert len(content) > 2 * MIB
    answer = await system.post(chat([image_part(content), image_part(content), "what is it?"]))
    assert answer.status_code == 200


async def test_what_looks_like_media_is_not_forwarded(system: System) -> None:
    """A text that begins like a data URL is stepped over before the parse, and found after it."""
    answer = await system.post(chat("data:" + "x" * 5 * MIB))
    assert refusal(answer) == (413, "prompt_too_large")
    assert system.prefill_decode.bodies == []


async def test_bodies_are_parsed_apart_from_media(system: System) -> None:
    """Every media thread is busy, and a large text is served meanwhile."""
    release = threading.Event()
    threads = system.gateway.services.media.intake.threads
    busy = [threads.submit(release.wait) for _ in range(system.gateway.settings.num_media_threads)]
    try:
        assert (await system.post(chat("x" * 100_000))).status_code == 200
    finally:
        release.set()
    assert all(job.result() for job in busy)


async def test_an_order_that_fails_in_the_gateway_is_answered_at_once(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: no request waits for the first token's deadline."""

    def broken(*_: Any) -> Any:
        raise ValueError("a fault of the gateway's own")

    body = chat([image_part(image_bytes())])
    with monkeypatch.context() as patched:
        patched.setattr("triptych_gateway.encode.flight_requests.encode_job", broken)
        assert refusal(await system.post(body)) == (500, "internal_error")
    await system.assert_idle()
    await until(lambda: not len(system.gateway.orders.flight_requests))
    assert (await system.post(body)).status_code == 200


async def test_media_whose_scheme_is_in_capitals(system: System) -> None:
    url = "DATA:" + data_url(image_bytes(size=(2500, 1000), image_format="BMP")).removeprefix("data:")
    part = {"type": "image_url", "image_url": {"url": url}}
    answer = await system.post(chat([part, part, "what is it?"]))
    assert answer.status_code == 200


# ---- bytes in flight ------------------------------------------------------------------------------
async def chunks(body: bytes, size: int = 40) -> AsyncIterator[bytes]:
    for at in range(0, len(body), size):
        yield body[at : at + size]


async def test_many_small_bodies_of_unknown_length(system: System) -> None:
    raw = httpx.Request("POST", "http://x", json=TEXT).content
    system.prefill_decode.behaviour = "hang"
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(system.post_raw(chunks(raw))) for _ in range(40)]
        await until(lambda: len(system.prefill_decode.bodies) == 40 or any(task.done() for task in asked))
        assert system.gateway.services.access.limiter.media_bytes == 40 * len(raw)
        system.prefill_decode.release.set()
    assert [task.result().status_code for task in asked] == [200] * 40


async def test_what_is_only_announced_takes_no_room(system: System) -> None:
    """Twenty clients announce 64 MiB each, and send a few bytes."""
    address = ("127.0.0.1", system.gateway.settings.port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 67108864\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(20):
            client = stack.enter_context(socket.create_connection(address))
            client.sendall(head + b"{")
        await until(lambda: system.gateway.services.access.limiter.num_requests == 20)
        assert (await system.post(TEXT)).status_code == 200
        await until(lambda: system.gateway.services.access.limiter.media_bytes == 20)


@pytest.mark.parametrize("system", [{"max_media_in_flight_bytes": 100_000}], indirect=True)
async def test_growth_is_refused_when_there_is_no_room(system: System) -> None:
    body = httpx.Request("POST", "http://x", json=chat("x" * 80_000)).content
    more = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:-1]
        await more.wait()
        yield body[-1:]

    async with asyncio.TaskGroup() as group:
        first = group.create_task(system.post_raw(slowly()))
        await until(lambda: system.gateway.services.access.limiter.media_bytes == len(body) - 1)
        assert refusal(await system.post_raw(chunks(body, 10_000))) == (429, "too_much_media")
        assert (await system.post(TEXT)).status_code == 200
        more.set()
    assert first.result().status_code == 200


async def test_bytes_are_given_back_as_media_are_decoded(system: System) -> None:
    content = image_bytes(size=(300, 300), image_format="BMP")
    body = chat([image_part(content)])
    num_bytes = len(httpx.Request("POST", "http://x", json=body).content)
    system.prefill_decode.behaviour = "hang"
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(system.post(body))
        await until(lambda: system.prefill_decode.bodies)
        held = system.gateway.services.access.limiter.media_bytes
        assert len(content) < held < len(content) + 500 < num_bytes
        system.prefill_decode.release.set()
    assert asked.result().status_code == 200
