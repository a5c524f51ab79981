"""Body splitter: pieces of a body become JSON text and media, decoded on the way.

    as sent   … "url":"data:image/png;base64,iVBORw0KGgo…ggg==" …      "data":"UklGRiQ…" …
    text      … "url":"data:image/png;base64,<marker>" …               "data":"<marker>" …

A marker has 16 random bytes that are drawn for this body: no caller can write one.

    TEXT --a string begins like media--> HEAD --long, and base64 as far as its head says--> MEDIA
      ^                                  |  |                                                |  |
      +----short: any other text---------'  `--something else--> WHOLE <--fault, or the end--'  |
      `-------------------------its closing quote-----------------------------------------------'

TEXT    bytes are JSON text. Also HEAD, but the string's bytes are still to be judged
MEDIA   bytes up to the next quote are decoded, and not kept as text
WHOLE   something came that is read otherwise, or not at all: everything from here on is text. The body
        is put back and read whole, so whatever is wrong with it is found as it always was

A string is media here if it is for `body_bounds`, and its base64 begins within `MAX_HEAD_BYTES`: it has
`body_bounds.MIN_MEDIA_BYTES` at least, and is a data URL, or the value of a key `data`. Parsing the body
shows whether media may stand there; if not, the body is put back as well.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import pybase64

from triptych_common.domain.transitions import check_transition
from triptych_gateway.request.body_bounds import MIN_MEDIA_BYTES
from triptych_gateway.request.data_url import Base64Decoder

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


# A data URL's quote and scheme; or a key, and the quote of its value. The same strings as `body_bounds` has.
_START = re.compile(rb'"[dD][aA][tT][aA](?::|": ?")')
_START_BYTES = 9  # of the longest
_HEAD = re.compile(rb"[dD][aA][tT][aA]:[ !#-+\--\[\]-~]*,")  # no quote, comma or backslash before its comma
_BASE64 = b";base64,"
MAX_HEAD_BYTES = 256  # as `data_url` has it
_MARKER_BYTES = 16
MAX_OTHER = 256  # strings that begin like media and are none; behind more the body is read whole


class SplitState(Enum):
    TEXT = auto()
    HEAD = auto()
    MEDIA = auto()
    WHOLE = auto()


ALLOWED: dict[SplitState, frozenset[SplitState]] = {
    SplitState.TEXT: frozenset({SplitState.HEAD}),
    SplitState.HEAD: frozenset({SplitState.TEXT, SplitState.MEDIA, SplitState.WHOLE}),
    SplitState.MEDIA: frozenset({SplitState.TEXT, SplitState.WHOLE}),
    SplitState.WHOLE: frozenset(),
}


class BodySplitter:
    """Splitter of one body. `feed` its pieces, then `finish`. Takes microseconds for each 64 KiB."""

    def __init__(self) -> None:
        self.num_bytes = 0  # that came
        self._state = SplitState.TEXT
        self._text = bytearray()
        self._search_from = 0  # in the text: nothing before it begins media
        self._start = 0  # HEAD: the string's opening quote
        self._quote_from = 0  # HEAD: no closing quote before it
        self._num_other = 0
        self._decoder = Base64Decoder()  # MEDIA: of the item that comes
        self._media: list[BodyMedia] = []
        self._num_media_bytes = 0  # of items that are complete
        self._prefix = ""  # of this body's markers

    @property
    def num_held(self) -> int:
        return len(self._text) + self._num_media_bytes + self._decoder.num_held

    def feed(self, piece: bytes) -> None:
        self.num_bytes += len(piece)
        while piece:
            if self._state is SplitState.MEDIA:
                piece = self._decode(piece)
            else:
                self._text += piece
                piece = b"" if self._state is SplitState.WHOLE else self._search()

    def finish(self) -> SplitBody:
        if self._state is SplitState.MEDIA:
            self._give_up()
        return SplitBody(self._text, self._media, self.num_bytes, is_odd=self._state is SplitState.WHOLE)

    # ---- JSON text ----------------------------------------------------------------------------------
    def _search(self) -> bytes:
        """Search the new text; return the bytes that follow the head of media, cut off the text."""
        while self._state in (SplitState.TEXT, SplitState.HEAD):
            if self._state is SplitState.TEXT and not self._find_start():
                return b""
            end = self._text.find(b'"', self._quote_from)
            num_known = (len(self._text) if end < 0 else end) - self._start
            if num_known >= MIN_MEDIA_BYTES:
                return self._cut_off()
            if end < 0:
                self._quote_from = len(self._text)
                return b""
            self._skip(end)
        return b""

    def _find_start(self) -> bool:
        text = self._text
        while (found := _START.search(text, self._search_from)) is not None:
            is_value = text[found.end() - 1 : found.end()] == b'"'
            self._start = found.end() - 1 if is_value else found.start()
            self._quote_from = found.end()
            self._enter(SplitState.HEAD)
            if text[found.start() - 1 : found.start()] != b"\\":
                return True
            self._skip(found.end())  # a quote within a string
            if self._state is SplitState.WHOLE:
                return False
        self._search_from = max(self._search_from, len(text) - _START_BYTES + 1)
        return False

    def _skip(self, search_from: int) -> None:
        self._num_other += 1
        self._search_from = search_from
        self._enter(SplitState.TEXT if self._num_other <= MAX_OTHER else SplitState.WHOLE)

    def _cut_off(self) -> bytes:
        """Cut off the bytes that follow the head of a long string, if it is base64."""
        text, start = self._text, self._start + 1
        head_end = start
        if text[start : start + 5].lower() == b"data:":
            head = _HEAD.match(text, start, start + MAX_HEAD_BYTES)
            if head is None or not head[0].lower().endswith(_BASE64):
                self._enter(SplitState.WHOLE)
                return b""
            head_end = head.end()
        following = bytes(text[head_end:])
        del text[head_end:]
        self._prefix = self._prefix or secrets.token_hex(_MARKER_BYTES)
        marker = f"{self._prefix}.{len(self._media)}."
        self._media.append(BodyMedia(text[start:].decode("ascii"), marker, head_end, b""))
        text += marker.encode("ascii")
        self._enter(SplitState.MEDIA)
        return following

    # ---- media --------------------------------------------------------------------------------------
    def _decode(self, piece: bytes) -> bytes:
        """Decode up to the closing quote; return the bytes that follow it."""
        end = piece.find(b'"')
        if not self._decoder.feed(piece if end < 0 else piece[:end]):
            self._give_up()
            return b"" if end < 0 else piece[end:]
        if end < 0:
            return b""
        last = self._decoder.finish()
        if last is None:
            self._give_up()
            return piece[end:]
        self._media[-1].digest = self._decoder.digest
        self._media[-1].rest = self._decoder.rest
        self._media[-1].num_rest_bytes = len(last)
        self._keep_decoded()
        self._text += b'"'
        self._search_from = len(self._text)
        self._enter(SplitState.TEXT)
        return piece[end + 1 :]

    def _give_up(self) -> None:
        """Give up an item that is not base64 or is incomplete; its undecoded bytes become text again."""
        self._text += self._decoder.rest
        self._keep_decoded()
        self._enter(SplitState.WHOLE)

    def _keep_decoded(self) -> None:
        content = self._media[-1].content = self._decoder.take()
        self._num_media_bytes += len(content)
        self._decoder = Base64Decoder()

    def _enter(self, state: SplitState) -> None:
        """Enter `state`. Nothing else assigns it."""
        check_transition(ALLOWED, "body splitter", self._state, state)
        self._state = state
