"""Data URLs and base64, read strictly: only an exact base64 `data:` URL is accepted, of whatever media type.

The bytes decide what an item is, as in vLLM: callers write `data:image`, `data:` or a wrong type.

    sent      whole groups of four characters | up to seven more, padding among them
    held      their bytes                     | the characters

Whole groups without padding are decoded as they come, by a library that takes a thirtieth of the time. The
last ones wait for the end, and are decoded by `binascii` itself. Padding that has more behind it is never
taken: `binascii` takes some of that, so it is asked again about what is refused here.
"""

import binascii
import io
import re

import pybase64
from blake3 import blake3

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import Modality

GROUP = 4  # characters, for three bytes
_PADDING = b"="


class Base64Decoder:
    """Decoder of one item. `feed` its characters, then `finish`; after a fault it takes no more."""

    def __init__(self) -> None:
        self._decoded = io.BytesIO()  # grows in place, and gives its memory away without a copy
        self.rest = b""  # the last characters, not decoded
        self.num_bytes = 0  # decoded
        self._hasher = blake3()  # of what is decoded, as `hashing.media_digest`

    @property
    def num_held(self) -> int:
        return self.num_bytes + len(self.rest)

    @property
    def digest(self) -> str:
        return self._hasher.hexdigest()

    def feed(self, data: bytes) -> bool:
        """Decode `data`; return False if it cannot follow, and leave it whole in `rest`."""
        data = self.rest + data if self.rest else data
        num_ready = max(len(data) - GROUP, 0) // GROUP * GROUP
        ready = memoryview(data)[:num_ready]
        try:
            decoded = pybase64.b64decode(ready, validate=True)
        except (binascii.Error, ValueError):
            self.rest = data
            return False
        if data[num_ready - 1 : num_ready] == _PADDING:  # and more behind it
            self.rest = data
            return False
        self._decoded.write(decoded)
        self._hasher.update(decoded)
        self.num_bytes += len(decoded)
        self.rest = data[num_ready:]
        return True

    def finish(self) -> bytes | None:
        """Return the last bytes, which `take` returns too; None if base64 cannot end here."""
        try:
            last = binascii.a2b_base64(self.rest, strict_mode=True)
        except binascii.Error:
            return None
        self._decoded.write(last)
        self._hasher.update(last)
        self.num_bytes += len(last)
        return last

    def take(self) -> bytes:
        """Return all bytes; the decoder is empty then."""
        content = self._decoded.getvalue()
        self._decoded = io.BytesIO()
        return content


_DATA_URL = re.compile(r"data:(?P<type>[^,;]*)(?P<options>(?:;[^,;]*)*),", re.IGNORECASE)
_MAX_HEADER_CHARS = 256
_PIECE_CHARS = 64 << 10  # decoded at once: no second copy of all of it, and other threads go on


def check_data_url(url: str, path: str, modality: Modality) -> None:
    """Refuse a `url` that is no data URL at all. Raises RequestError: 400."""
    if url[:5].lower() != "data:":
        message = f"{path} must be a data URL or an http(s) URL"
        raise RequestError(400, f"invalid_{modality}_url", message, path)


def decode_data_url(url: str, path: str, modality: Modality, max_bytes: int) -> bytes:
    """Return the bytes of media given as a data URL.

    Args:
        path: place of the URL in the request, for errors.

    Raises:
        RequestError: 400, or 413 when the media are larger than `max_bytes`.
    """
    return decode_base64(url, _head_end(url, path, modality), path, modality, max_bytes)


def check_decoded(content: bytes, head: str, path: str, modality: Modality, max_bytes: int) -> bytes:
    """Check media that were decoded on arrival; `head` is the text before their base64."""
    if head:
        _head_end(head, path, modality)
    if len(content) > max_bytes:
        raise too_large(path, max_bytes)
    return content


def _head_end(url: str, path: str, modality: Modality) -> int:
    check_data_url(url, path, modality)
    header = _DATA_URL.match(url[:_MAX_HEADER_CHARS])
    if header is None:
        raise RequestError(400, f"invalid_{modality}_url", f"{path} is not a well-formed data URL", path)
    options = header["options"].lower().split(";")
    if options[-1] != "base64":
        message = f"{path} must start with data:{modality}/<format>;base64,"
        raise RequestError(400, f"invalid_{modality}_url", message, path)
    return header.end()


def decode_base64(text: str, start: int, path: str, modality: Modality, max_bytes: int) -> bytes:
    """Return the bytes of base64 that begins at `start`. Raises as `decode_data_url` does."""
    if (len(text) - start) // 4 * 3 > max_bytes + 2:
        raise too_large(path, max_bytes)
    media = _decoded(text, start)
    if media is None:
        raise RequestError(400, "invalid_base64", f"{path} is not valid base64", path)
    if len(media) > max_bytes:
        raise too_large(path, max_bytes)
    if not media:
        raise RequestError(400, f"invalid_{modality}", f"{path} is empty", path)
    return media


def _decoded(text: str, start: int) -> bytes | None:
    """Decode in pieces, without a second copy of the text; `binascii` judges odd text as a whole."""
    decoder = Base64Decoder()
    try:
        pieces = (
            text[at : at + _PIECE_CHARS].encode("ascii") for at in range(start, len(text), _PIECE_CHARS)
        )
        if all(map(decoder.feed, pieces)) and decoder.finish() is not None:
            return decoder.take()
        return binascii.a2b_base64(text[start:].encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        return None


def too_large(path: str, max_bytes: int) -> RequestError:
    """Return the 413 for one media item."""
    return RequestError(413, "media_too_large", f"{path} is larger than {max_bytes} bytes", path)
