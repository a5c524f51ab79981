"""Base64 in pieces: accepted pieces decode to the same bytes by `binascii` as a whole.

    sent      whole groups of four characters | up to seven more, padding among them
    held      their bytes                     | the characters

Whole groups without padding are decoded as they come, by a library that takes a thirtieth of the time. The
last ones wait for the end, and are decoded by `binascii` itself. Padding that has more behind it is never
taken: `binascii` takes some of that, so it is asked again about what is refused here.
"""

import binascii
import io

import pybase64
from blake3 import blake3

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
        """Digest of the decoded bytes."""
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
