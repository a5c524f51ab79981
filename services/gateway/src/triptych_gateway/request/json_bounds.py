"""Bounds on a body's JSON text, checked on the raw bytes before anything parses it.

A parser makes one Python object per value and holds the interpreter's lock meanwhile, so a body of empty
lists costs a gigabyte and stops the event loop for seconds. Counting costs next to nothing: media, the
bulk of a large body, are stepped over, and the scan ends where a bound is passed.

    body = media (long `"data:…"` strings, and those of `"data"`) + prompt (everything else)

For text that is no JSON the counts are right up to its first fault, where the parser stops.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from triptych_common.domain.errors import RequestError

MAX_DEPTH = 253  # of objects and lists; orjson writes no more

# As `data_url` takes it, in any case; or the value of `input_audio`, as JSON's writers write it.
_MEDIA_START = re.compile(rb'"[dD][aA][tT][aA]:|(?<="data":)"|(?<="data": )"')
_MEDIA_START_BYTES = 6
STEP = 64 << 10  # bytes that are copied at once
MIN_MEDIA_BYTES = 4096  # shorter strings are scanned like any other text

_TOKEN = re.compile(
    rb"""
      (?P<string> " [^"\\]*+ (?: \\. [^"\\]*+ )*+ "? )
    | (?P<empty>  \[[ \t\r\n]*+\] | \{[ \t\r\n]*+\} )
    | (?P<open>   [\[{] )
    | (?P<close>  [\]}] )
    | ,
    """,
    re.VERBOSE | re.DOTALL,
)
_STRING, _EMPTY, _OPEN, _CLOSE = (_TOKEN.groupindex[name] for name in ("string", "empty", "open", "close"))


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """Bounds on the JSON text of one body."""

    max_prompt_bytes: int = 4 << 20
    max_values: int = 50_000


def check_bounds(raw: bytes | bytearray, bounds: BodyBounds) -> None:
    """Refuse a body that would cost too much to parse, here or in prefill_decode.

    Raises:
        RequestError: 413 too much text beside the media; 400 too many values, or nested too deeply.
    """
    spans = list(_prompt_spans(raw, bounds))
    count_values(raw, bounds.max_values, spans)


def count_values(
    raw: bytes | bytearray, max_values: int, spans: list[tuple[int, int]] | None = None
) -> int | None:
    """Return the number of values in a JSON text; None if it is too short to pass a bound.

    Raises:
        RequestError: 400 more than `max_values`, or nested more than `MAX_DEPTH` deep.
    """
    spans = [(0, len(raw))] if spans is None else spans
    num_opened = _count(raw, b"[", spans) + _count(raw, b"{", spans)
    if num_opened <= MAX_DEPTH and num_opened + _count(raw, b",", spans) < max_values:
        return None  # as most bodies: those signs are in its texts, too, and still few enough
    num_values, num_strings, num_empty, depth = 1, 0, 0, 0
    for start, end in spans:
        for token in _TOKEN.finditer(raw, start, end):
            kind = token.lastindex
            if kind == _STRING:
                num_strings += 1
                if num_strings > 2 * max_values:  # key and value; reached by faulty text only
                    raise too_complex(max_values)
                continue
            if kind == _CLOSE:
                depth -= 1
                if depth < 0:
                    return num_values  # no JSON: the parser stops here as well
                continue
            if kind == _EMPTY:
                num_empty += 1  # a value that its parent's sign has counted, except in faulty text
                if num_empty > max_values or depth + 1 > MAX_DEPTH:
                    raise too_complex(max_values)
                continue
            if kind == _OPEN:
                depth += 1
            num_values += 1  # the first child of a list or object, or the one after a comma
            if num_values > max_values or depth > MAX_DEPTH:
                raise too_complex(max_values)
    return num_values


def _count(raw: bytes | bytearray, sign: bytes, spans: list[tuple[int, int]]) -> int:
    return sum(raw.count(sign, start, end) for start, end in spans)


def _prompt_spans(raw: bytes | bytearray, bounds: BodyBounds) -> Iterator[tuple[int, int]]:
    """Yield start and end of the text between the media; at most `max_prompt_bytes` together.

    Behind more short strings that begin like media than a body may have strings, the rest is prompt.

    Raises:
        RequestError: 413 there is more.
    """
    position, left = 0, bounds.max_prompt_bytes
    search_from, num_other = 0, 0
    while num_other <= 2 * bounds.max_values:  # key and value
        # No further than the bound: what lies beyond is not searched.
        found = _MEDIA_START.search(raw, search_from, position + left + _MEDIA_START_BYTES)
        if found is None:
            break
        start = found.start()
        end = _media_end(raw, start)
        if end is None:
            search_from = found.end()
            num_other += 1
            continue
        yield position, start
        left -= start - position
        position = search_from = end
    if len(raw) - position > left:
        raise prompt_too_large(bounds.max_prompt_bytes)
    yield position, len(raw)


def _media_end(raw: bytes | bytearray, start: int) -> int | None:
    """Return the end of the media string that opens at `start`, behind its quote; None for other text.

    A quote with a backslash before it lies inside a string, and media hold no such quote.
    """
    end = raw.find(b'"', start + 1)
    if end - start < MIN_MEDIA_BYTES or raw[end - 1 : end] == b"\\" or raw[start - 1 : start] == b"\\":
        return None
    # A character beyond ASCII makes Python store the whole string with up to four bytes for each.
    is_ascii = all(raw[at : min(at + STEP, end)].isascii() for at in range(start, end, STEP))
    return end + 1 if is_ascii else None


def prompt_too_large(max_prompt_bytes: int) -> RequestError:
    message = f"the body without its media is larger than {max_prompt_bytes} bytes"
    return RequestError(413, "prompt_too_large", message)


def too_complex(max_values: int) -> RequestError:
    message = f"the body has more than {max_values} values, or is nested more than {MAX_DEPTH} deep"
    return RequestError(400, "body_too_complex", message)
