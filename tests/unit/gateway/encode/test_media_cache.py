"""Media are kept as long as a request holds them."""

from triptych_common.protocol.ids import MmHash, RequestId
from triptych_gateway.encode.media_cache import MediaCache

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
