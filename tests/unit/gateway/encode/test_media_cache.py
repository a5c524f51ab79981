"""Media are kept as long as a request holds them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from triptych_common.protocol.ids import MmHash, RequestId
from triptych_gateway.encode.media_cache import MediaCache
from triptych_gateway.files.file_store import file_not_found
from triptych_gateway.request.content_parts import KnownFile

H = MmHash("a" * 64)
R1, R2, R3 = RequestId("r1"), RequestId("r2"), RequestId("r3")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def file_of(threads: ThreadPoolExecutor, file_id: str, content: bytes | None) -> KnownFile:
    """`content` None: it was deleted."""

    def read() -> bytes:
        if content is None:
            raise file_not_found(file_id)
        return content

    return KnownFile(file_id, 1, "0" * 64, (), None, read, threads)


async def fetched(media_cache: MediaCache, token: str) -> bytes:
    slot = media_cache.media_by_token(token)
    assert slot is not None
    return await slot.fetch()


async def test_kept_while_a_request_holds_it() -> None:
    media_cache = MediaCache()
    token = media_cache.keep_media(H, b"x", R1)
    assert media_cache.keep_media(H, b"x", R2) == token
    assert len(token) >= 40
    media_cache.release_media(H, R1)
    assert await fetched(media_cache, token) == b"x"
    media_cache.release_media(H, R2)
    media_cache.release_media(H, R2)
    assert media_cache.media_by_token(token) is None
    assert len(media_cache) == 0


async def test_bytes_win_over_files_as_long_as_their_request_lives(threads: ThreadPoolExecutor) -> None:
    media_cache = MediaCache()
    token = media_cache.keep_media(H, file_of(threads, "file-1", b"from a file"), R1)
    assert await fetched(media_cache, token) == b"from a file"
    assert media_cache.keep_media(H, b"sent", R2) == token
    media_cache.keep_media(H, file_of(threads, "file-3", b"from a file"), R3)
    assert await fetched(media_cache, token) == b"sent"
    media_cache.release_media(H, R2)
    assert await fetched(media_cache, token) == b"from a file"
