"""Media intake: strict data URLs, header check, identity."""

import asyncio
import errno
import gc
import struct
import time
import warnings
import weakref
import zlib
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import orjson
import pytest
from PIL import Image

from tests.support.gateway.samples import data_url, image_bytes
from tests.support.hostile.chunks import jpeg_that_is_fli
from triptych_common.domain.errors import RequestError
from triptych_common.domain.hashing import tenant_salt
from triptych_common.protocol.messages import Modality
from triptych_gateway.fetch.fetcher import MediaFetcher
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.request.chat_request import ChatRequest, parse_chat_request
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.data_url import decode_data_url
from triptych_gateway.request.image_header import ImageLimits, read_image_header
from triptych_gateway.request.item_checks import MediaLimits
from triptych_gateway.request.media import MediaIntake, TakenItem
from triptych_gateway.request.named_items import NamedItems
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard

PATH = "messages[0].content[0].image_url.url"
LIMITS = MediaLimits(max_item_bytes=10_000, image=ImageLimits(max_pixels=10_000, formats=("PNG", "JPEG")))
DIGEST = "d" * 64
NAMELESS = cast("NamedItems", None)  # no part here has a `uuid`


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def refusal(url: str, max_bytes: int = 100) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode_data_url(url, PATH, Modality.IMAGE, max_bytes)
    assert caught.value.param == PATH
    return caught.value


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://example.org/a.png", "invalid_image_url"),
        ("file:///etc/passwd", "invalid_image_url"),
        ("a.png", "invalid_image_url"),
        ("data:image/png;base64", "invalid_image_url"),
        ("data:image/png,AAAA", "invalid_image_url"),
        ("data:base64,AAAA", "invalid_image_url"),
        ("data:image/png;base64;x=y,AAAA", "invalid_image_url"),
        ("data:image/png;base64,", "invalid_image"),
        ("data:image/png;base64,AAA", "invalid_base64"),
        ("data:image/png;base64,AA==AA==", "invalid_base64"),
        ("data:image/png;base64,AAA!", "invalid_base64"),
        ("data:image/png;base64,AAA\n", "invalid_base64"),
        ("data:image/png;base64,_-8=", "invalid_base64"),
        ("data:image/png;base64,ÄÖÜß", "invalid_base64"),
    ],
)
def test_data_url_refused(url: str, code: str) -> None:
    error = refusal(url)
    assert (error.status_code, error.code) == (400, code)


def test_data_url_size_limit() -> None:
    assert decode_data_url(data_url(b"x" * 100), PATH, Modality.IMAGE, 100) == b"x" * 100
    assert refusal(data_url(b"x" * 101)).status_code == 413
    assert refusal(data_url(b"x" * 10_000)).status_code == 413


def test_data_url_with_parameters_and_capitals() -> None:
    assert decode_data_url("DATA:image/PNG;charset=utf-8;BASE64,AAAA", PATH, Modality.IMAGE, 100) == b"\0\0\0"


@pytest.mark.parametrize("media_type", ["image", "", "application/octet-stream", "image/jpeg", "text/plain"])
async def test_the_bytes_decide_what_an_item_is(threads: ThreadPoolExecutor, media_type: str) -> None:
    wanted = await take(threads, data_url(image_bytes()))
    assert await take(threads, data_url(image_bytes(), media_type)) == wanted


def png_header(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 8) + b"IDAT" + bytes(12)


@pytest.mark.parametrize(
    "content",
    [
        b"not an image",
        b"\x89PNG\r\n\x1a\n",
        image_bytes()[:20],
        png_header(0, 5),
        image_bytes(image_format="GIF"),
        b"\xff\xd8\xff",
        b"<svg/>",
    ],
)
def test_not_an_image(content: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read_image_header(content, PATH, LIMITS.image)
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (400, "invalid_image", PATH)


@pytest.mark.parametrize("size", [(101, 100), (30_000, 30_000), (10_000, 10_000)])
def test_bombs_are_refused_by_their_header(size: tuple[int, int]) -> None:
    with warnings.catch_warnings(), pytest.raises(RequestError) as caught:
        read_image_header(png_header(*size), PATH, LIMITS.image)
    assert (caught.value.status_code, caught.value.code) == (413, "image_too_large")


async def take(threads: ThreadPoolExecutor, url: str, **options: Any) -> Any:
    request = replace(
        chat_request(url, 1),
        processor_options=options.get("processor", {}),
        media_io_options=options.get("media_io", {}),
        tenant_salt=options.get("salt", ""),
    )
    return (await take_all(threads, request, options.get("digest", DIGEST)))[0]


async def take_all(
    threads: ThreadPoolExecutor, request: ChatRequest, digest: str = DIGEST, limits: MediaLimits = LIMITS
) -> tuple[TakenItem, ...]:
    """By a gateway that fetches nothing."""
    fetcher = MediaFetcher(None, None, None, threads, GatewayMetrics(), 1.0)
    intake = MediaIntake(limits, threads, fetcher, NAMELESS, GatewayMetrics())
    return await intake.take_items(request, "owner", digest, time.monotonic() + 10, lambda _: None)


def chat_request(url: str, num_items: int) -> ChatRequest:
    content = [{"type": "image_url", "image_url": {"url": url}}] * num_items
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    return parse_chat_request(orjson.dumps(body), PlaceholderGuard(()), 8)


async def test_identity_follows_content_options_and_namespace(threads: ThreadPoolExecutor) -> None:
    url = data_url(image_bytes())
    plain = await take(threads, url)
    assert plain.mm_hash == (await take(threads, url)).mm_hash
    others = [
        await take(threads, data_url(image_bytes(1))),
        await take(threads, url, digest="e" * 64),
        await take(threads, url, processor={"min_pixels": 4}),
        await take(threads, url, media_io={"image": {"image_mode": "RGBA"}}),
        await take(threads, url, salt=tenant_salt("one")),
        await take(threads, url, salt=tenant_salt("two")),
    ]
    assert len({plain.mm_hash, *(other.mm_hash for other in others)}) == 7
    unrelated = await take(threads, url, media_io={"video": {"num_frames": 2}})
    assert unrelated.mm_hash == plain.mm_hash
    assert others[3].media_io_options == {"image_mode": "RGBA"}


MP4 = b"\0\0\0\x18ftypisom" + b"\0" * 12


@pytest.mark.parametrize("modality", ["image", "video"])
async def test_how_a_video_is_divided_is_part_of_its_identity(
    threads: ThreadPoolExecutor, modality: str
) -> None:
    media = image_bytes() if modality == "image" else MP4
    taken = []
    for piece_rows in (0, 500, 1000):
        url = f"data:{modality}/{'png' if modality == 'image' else 'mp4'};base64,{b64encode(media).decode()}"
        content = [{"type": f"{modality}_url", f"{modality}_url": {"url": url}}]
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        request = parse_chat_request(orjson.dumps(body), PlaceholderGuard(()), 8)
        limits = replace(LIMITS, video_piece_rows=piece_rows)
        taken += await take_all(threads, request, limits=limits)
    if modality == "image":
        assert {(item.mm_hash, item.piece_rows) for item in taken} == {(taken[0].mm_hash, 0)}
    else:
        assert [item.piece_rows for item in taken] == [0, 500, 1000]
        assert len({item.mm_hash for item in taken}) == 3


async def test_text_is_dropped_once_taken_and_equal_bytes_are_held_once(threads: ThreadPoolExecutor) -> None:
    request = chat_request(data_url(image_bytes()), 2)
    first, second = await take_all(threads, request)
    assert first.content is second.content
    assert [part.url for part in request.media] == ["", ""]
    assert request.body["messages"] == [{"role": "user", "content": [None, None]}]


async def test_no_request_waits_behind_the_whole_upload_of_another(threads: ThreadPoolExecutor) -> None:
    """One thread for two requests: each gets its turn, item by item."""
    order: list[str] = []

    class Recorded(ChatRequest):
        def drop_text(self, part: MediaPart) -> None:
            order.append(self.model)
            super().drop_text(part)

    async def take_for(name: str, num_items: int) -> None:
        request = chat_request(data_url(image_bytes()), num_items)
        recorded = Recorded(**{**vars(request), "model": name})
        await take_all(threads, recorded)

    await asyncio.gather(take_for("large", 4), take_for("small", 1))
    assert order == ["large", "small", "large", "large", "large"]


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.EMFILE, "Too many open files"), OSError("out of memory error")]
)
async def test_lack_of_memory_is_no_fault_of_the_image(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(RequestError) as caught:
        await take(threads, data_url(image_bytes()))
    assert (caught.value.status_code, caught.value.code) == (503, "no_resources")
    assert "memory" not in caught.value.message


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://example.org/a.png", "remote_media_disabled"),
        ("HTTPS://example.org/a.png", "remote_media_disabled"),
        ("file:///etc/passwd", "url_not_allowed"),
        ("ftp://example.org/a.png", "invalid_image_url"),
    ],
)
async def test_urls_where_nothing_is_fetched(threads: ThreadPoolExecutor, url: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        await take(threads, url)
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (400, code, PATH)


async def test_a_file_of_two_formats_is_refused(threads: ThreadPoolExecutor) -> None:
    both = jpeg_that_is_fli(image_bytes(image_format="JPEG"), 64)
    with pytest.raises(RequestError) as caught:
        await take(threads, data_url(both))
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (400, "invalid_image", PATH)


class Download:
    """What a failed request must not keep."""


class FailingFetcher:
    """Every fetch fails while it holds something."""

    def __init__(self) -> None:
        self.held: list[weakref.ref[Download]] = []

    def accept(self, url: str, path: str, modality: Modality) -> Any:
        return url

    async def fetch(self, *args: Any) -> bytes:
        download = Download()
        self.held.append(weakref.ref(download))
        await asyncio.sleep(0)
        raise RequestError(502, "media_fetch_failed", "it failed")


async def test_a_failed_fetch_keeps_nothing(threads: ThreadPoolExecutor) -> None:
    fetcher = FailingFetcher()
    intake = MediaIntake(LIMITS, threads, cast("MediaFetcher", fetcher), NAMELESS, GatewayMetrics())
    gc.disable()
    try:
        with pytest.raises(RequestError):
            await intake.take_items(
                chat_request("https://example.org/1.png", 2),
                "owner",
                DIGEST,
                time.monotonic() + 10,
                lambda _: None,
            )
        await asyncio.sleep(0)
        assert [each() for each in fetcher.held] == [None, None]
    finally:
        gc.enable()
