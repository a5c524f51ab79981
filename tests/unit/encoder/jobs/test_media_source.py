"""Where a job's media come from, over a mock transport."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from tests.support.message_samples import encode_job
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeJob
from triptych_encoder.jobs import media_source
from triptych_encoder.jobs.media_source import MediaGoneError, MediaSource

MEDIA = b"0123456789"
URL = "http://gateway:8000/internal/media/token"
Handler = Callable[[httpx.Request], httpx.Response]


def job_of(*, url: str | None = URL, num_bytes: int = len(MEDIA)) -> EncodeJob:
    return encode_job(media_num_bytes=num_bytes, media_url=url)


async def fetch(
    handler: Handler, job: EncodeJob, *, blob: bytes | None = None, remaining_ms: int | None = None
) -> bytes:
    envelope = Envelope(job, blob=blob, remaining_ms=remaining_ms, received_at=time.monotonic())
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
        return await MediaSource(client, max_bytes=100).fetch(job, envelope)


def never(request: httpx.Request) -> httpx.Response:
    raise AssertionError("nothing is to be fetched")


def answer(content: bytes, status_code: int = 200) -> Handler:
    return lambda request: httpx.Response(status_code, content=content)


async def test_media_inside_the_job_must_be_of_the_announced_length() -> None:
    with pytest.raises(MediaGoneError, match="length"):
        await fetch(never, job_of(), blob=MEDIA[1:])


@pytest.mark.parametrize("content", [b"", MEDIA[:-1], MEDIA + b"x", MEDIA * 20])
async def test_media_of_another_length_are_refused(content: bytes) -> None:
    with pytest.raises(MediaGoneError, match="length"):
        await fetch(answer(content), job_of())


@pytest.mark.parametrize("job", [job_of(url=None), job_of(num_bytes=101)])
async def test_media_that_are_nowhere_or_too_large_are_not_fetched(job: EncodeJob) -> None:
    with pytest.raises(MediaGoneError):
        await fetch(never, job)


@pytest.mark.parametrize("status_code", [302, 404, 410, 500])
async def test_a_gateway_that_serves_them_no_longer(status_code: int) -> None:
    with pytest.raises(MediaGoneError) as caught:
        await fetch(answer(b"", status_code), job_of())
    assert isinstance(caught.value.__cause__, httpx.HTTPStatusError)
    assert "HTTPStatusError" not in str(caught.value)  # which the caller receives


async def test_a_gateway_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_source, "BUSY_WAIT_S", 0.0)
    answers = [httpx.Response(503), httpx.Response(503), httpx.Response(200, content=MEDIA)]
    assert await fetch(lambda request: answers.pop(0), job_of()) == MEDIA


async def test_a_gateway_that_stays_busy_costs_no_more_than_the_jobs_time() -> None:
    with pytest.raises(MediaGoneError):
        await fetch(answer(b"", 503), job_of(), remaining_ms=50)


async def test_a_gateway_that_is_gone() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(MediaGoneError) as caught:
        await fetch(handler, job_of())
    assert isinstance(caught.value.__cause__, httpx.ConnectError)
    assert "ConnectError" not in str(caught.value)  # which the caller receives


@pytest.mark.parametrize("url", ["http://[", "ftp://gateway/media", "not a url", "http://gateway:99999999/"])
async def test_an_address_that_is_none(url: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.UnsupportedProtocol("no")

    with pytest.raises(MediaGoneError):
        await fetch(handler, job_of(url=url))


class Drip(httpx.AsyncByteStream):
    """A byte at a time; each read in time, the whole never."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            yield b""


async def test_a_gateway_that_drips_is_not_waited_for_beyond_the_deadline() -> None:
    with pytest.raises(MediaGoneError) as caught:
        await fetch(lambda request: httpx.Response(200, stream=Drip()), job_of(), remaining_ms=50)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert "TimeoutError" not in str(caught.value)  # which the caller receives


async def test_a_fetch_ends_once_it_has_more_than_was_announced() -> None:
    num_chunks = 0

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            nonlocal num_chunks
            while True:
                num_chunks += 1
                yield MEDIA

    with pytest.raises(MediaGoneError, match="length"):
        await fetch(lambda request: httpx.Response(200, stream=Endless()), job_of())
    assert num_chunks == 2
