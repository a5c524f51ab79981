"""Body without its media: JSON text with a marker in the place of each, and their bytes beside it.

    as sent   … "url":"data:image/png;base64,iVBORw0KGgo…ggg==" …      "data":"UklGRiQ…" …
    text      … "url":"data:image/png;base64,<marker>" …               "data":"<marker>" …

A marker has 16 random bytes that are drawn for this body: no caller can write one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pybase64

PIECE_BYTES = 48 << 10  # put back at once: no remainder modulo three


@dataclass(slots=True)
class BodyMedia:
    """One item that was cut out. Its bytes can be written as they were sent."""

    head: str  # as a data URL has before its base64; "": none
    marker: str
    at: int  # of the marker in the text
    content: bytes = field(repr=False)
    digest: str = ""  # of `content`, taken as it came; "" where it is not complete
    rest: bytes = b""  # the last characters of its base64, as sent
    num_rest_bytes: int = 0  # what they decode to: the last ones of `content`

    @property
    def text(self) -> str:
        """JSON string in the place of the media."""
        return self.head + self.marker

    @property
    def num_chars(self) -> int:
        """Characters of the JSON string that was sent."""
        return len(self.head) + (len(self.content) - self.num_rest_bytes) // 3 * 4 + len(self.rest)


class SplitBody:
    """Result of a `BodySplitter`. With `is_odd` it must be put back before anything reads it."""

    def __init__(self, text: bytearray, media: list[BodyMedia], num_bytes: int, *, is_odd: bool) -> None:
        self.text = text
        self.num_bytes = num_bytes  # as sent
        self.is_odd = is_odd
        self._media = media

    @property
    def num_media(self) -> int:
        return len(self._media)

    def media_by_text(self) -> Mapping[str, BodyMedia]:
        """Media by the JSON string that stands for each."""
        return {media.text: media for media in self._media}

    def put_back(self) -> bytearray:
        """Return the body as sent. This one is empty then: no bytes are held twice for long."""
        if not self._media:
            return self.text
        raw, position = bytearray(), 0
        media, self._media = self._media[::-1], []
        with memoryview(self.text) as text:
            while media:
                item = media.pop()
                raw += text[position : item.at]
                position = item.at + len(item.marker)
                _encode(item, raw)
            raw += text[position:]
        self.text = bytearray()
        return raw


def _encode(item: BodyMedia, raw: bytearray) -> None:
    num_whole = len(item.content) - item.num_rest_bytes
    with memoryview(item.content) as content:
        for at in range(0, num_whole, PIECE_BYTES):
            raw += pybase64.b64encode(content[at : min(at + PIECE_BYTES, num_whole)])
    raw += item.rest
