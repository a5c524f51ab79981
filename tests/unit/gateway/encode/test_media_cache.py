"""Media are kept as long as a request holds them."""

from concurrent.futures import ThreadPoolExecutor

from triptych_common.protocol.ids import MmHash, RequestId
from triptych_gateway.encode.media_cache import MediaCache
from triptych_gateway.request.known_file import KnownFile

H = MmHash("a" * 64)


def test_kept_while_a_request_holds_it() -> None:
    media_cache = MediaCache()
    token = media_cache.keep_media(H, b"x", RequestId("r1"))
    assert media_cache.keep_media(H, b"x", RequestId("r2")) == token
    assert len(token) >= 40
    media_cache.release_media(H, RequestId("r1"))
    assert media_cache.media_by_token(token) == b"x"
    media_cache.release_media(H, RequestId("r2"))
    media_cache.release_media(H, RequestId("r2"))
    assert media_cache.media_by_token(token) is None
    assert len(media_cache) == 0


def test_bytes_that_a_request_has_sent_are_kept_in_the_place_of_a_file() -> None:
    """The file may be deleted while that request lives."""
    media_cache = MediaCache()
    with ThreadPoolExecutor(1) as threads:
        file = KnownFile("file-1", 1, "0" * 64, (), None, lambda: b"x", threads)
        token = media_cache.keep_media(H, file, RequestId("r1"))
        assert media_cache.media_by_token(token) is file
        assert media_cache.keep_media(H, b"x", RequestId("r2")) == token
        assert media_cache.media_of(H) == (token, b"x")
        media_cache.keep_media(H, file, RequestId("r3"))
        assert media_cache.media_of(H) == (token, b"x")
