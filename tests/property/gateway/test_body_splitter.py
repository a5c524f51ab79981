"""A body that is split while it comes gives the request, the bytes and the errors that it gives read whole.

The whole way is written out here: the body is parsed as one text, and base64 decoded by `binascii` in one go.
"""

import asyncio
import base64
import binascii
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from triptych_common.domain.errors import IllegalTransitionError, RequestError
from triptych_gateway.endpoints.endpoint import Endpoint
from triptych_gateway.endpoints.table import CHAT, MESSAGES
from triptych_gateway.request.body_bounds import MIN_MEDIA_BYTES
from triptych_gateway.request.body_splitter import ALLOWED, MAX_OTHER, BodySplitter, SplitBody, SplitState
from triptych_gateway.request.chat_request import (
    ChatRequest,
    RequestOptions,
    RequestParser,
    parse_chat_request,
)
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.data_url import Base64Decoder, check_data_url, too_large
from triptych_gateway.request.item_checks import bytes_of
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard
from triptych_gateway.settings import RequestSettings

GUARD = PlaceholderGuard(("<|image_pad|>",))
MAX_ITEMS = 4
MAX_ITEM_BYTES = 9000
LIMITS = RequestSettings(max_prompt_bytes=30_000, max_body_values=200, max_messages=5, max_items=MAX_ITEMS)
HEADS = [
    *["data:image/png;base64,"] * 6,
    *("DATA:image/PNG;charset=utf-8;BASE64,", "data:video/mp4;base64,", "data:audio/wav;base64,"),
    *("data:;base64,", "data:image/png,", "data:image/png;base64", "data:text/plain;base64,", "data:"),
    *("", "http://x/", "data:image/é;base64,", "data:image/" + "x" * 300 + ";base64,", "data:a;b;base64,"),
    "data:image/<|image_pad|>;base64,",
]

# ---- the whole way ---------------------------------------------------------------------------------
Outcome = tuple[Any, ...]


def refused(error: RequestError) -> Outcome:
    return error.status_code, error.code, error.param


def whole_bytes(part: MediaPart) -> bytes:
    """As `binascii` decodes the text of a part in one go."""
    text = part.url
    if not part.is_base64:
        check_data_url(text, part.path, part.modality)
        head, comma, text = text.partition(",")
        kinds = head[5:].split(";")
        if not comma or len(head) >= 256 or len(kinds) < 2 or kinds[-1].lower() != "base64":
            raise RequestError(400, f"invalid_{part.modality}_url", "", part.path)
    if len(text) // 4 * 3 > MAX_ITEM_BYTES + 2:
        raise too_large(part.path, MAX_ITEM_BYTES)
    try:
        content = binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise RequestError(400, "invalid_base64", "", part.path) from error
    if len(content) > MAX_ITEM_BYTES:
        raise too_large(part.path, MAX_ITEM_BYTES)
    if not content:
        raise RequestError(400, f"invalid_{part.modality}", "", part.path)
    return content


def item_outcome(part: MediaPart, *, is_whole: bool) -> Outcome:
    try:
        content = whole_bytes(part) if is_whole else bytes_of(part, MAX_ITEM_BYTES)
    except RequestError as error:
        return refused(error)
    return part.modality, part.path, content


def outcome_of(request: ChatRequest, *, is_whole: bool) -> Outcome:
    items = [item_outcome(part, is_whole=is_whole) for part in request.media]
    for part in request.media:
        request.drop_text(part)
    assert all(part.content is None for part in request.media)
    return items, request


def read_whole(raw: bytes, endpoint: Endpoint = CHAT) -> Outcome:
    try:
        request = parse_chat_request(raw, GUARD, MAX_ITEMS, LIMITS, endpoint=endpoint)
        return outcome_of(request, is_whole=True)
    except RequestError as error:
        return refused(error)


# ---- the way of the gateway ------------------------------------------------------------------------
@pytest.fixture(scope="module")
def parser() -> Iterator[RequestParser]:
    with ThreadPoolExecutor(1) as threads:
        yield RequestParser(GUARD, LIMITS, RequestOptions(), threads)


def split(raw: bytes, cuts: list[int]) -> SplitBody:
    splitter = BodySplitter()
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        splitter.feed(raw[start:end])
        assert splitter.num_held <= splitter.num_bytes + 100 * (1 + raw.count(b'"data'))
    body = splitter.finish()
    assert body.num_bytes == len(raw)
    return body


def read_split(parser: RequestParser, raw: bytes, cuts: list[int], endpoint: Endpoint = CHAT) -> Outcome:
    body = split(raw, cuts)
    try:
        request = asyncio.run(parser.parse(body, lambda num_bytes: None, endpoint))
    except RequestError as error:
        return refused(error)
    return outcome_of(request, is_whole=False)


# ---- bodies ----------------------------------------------------------------------------------------
@st.composite
def base64_texts(draw: st.DrawFn) -> str:
    """Base64, mostly long enough to be media, at times with a fault."""
    num_bytes = draw(st.sampled_from([0, 1, 5, 3000, 3050, 3071, 3072, 3073, 4000, 8999, 9000, 9001, 20_000]))
    text = base64.b64encode(random.Random(draw(st.integers(0, 3))).randbytes(num_bytes)).decode()
    kind = draw(st.sampled_from([*["none"] * 6, "insert", "cut", "add", "no padding", "bits"]))
    if kind == "insert":
        at = draw(st.integers(0, len(text)))
        return (
            text[:at]
            + draw(st.sampled_from(["=", "\n", " ", "é", "-", '"', "\\", "!", "A", "<|image_pad|>"]))
            + text[at:]
        )
    if kind == "cut":
        return text[: draw(st.integers(0, len(text)))]
    if kind == "add":
        return text.rstrip("=" * draw(st.integers(0, 1))) + draw(
            st.sampled_from(["=", "==", "AAAA", "AA==", "====", "A", " "])
        )
    if kind == "no padding":
        return text.rstrip("=")
    return text[:-4] + "AB==" if kind == "bits" and text else text  # bits that no encoder writes


MEDIA_TEXTS = st.builds(str.__add__, st.sampled_from(HEADS), base64_texts())
TEXTS = (
    st.sampled_from(["", "x", "data:", '"data":', 'a "data:b"', "\\", "<|image_pad|>", "é\n"]) | MEDIA_TEXTS
)
PARTS = st.one_of(
    MEDIA_TEXTS.map(lambda url: {"type": "image_url", "image_url": {"url": url}}),
    MEDIA_TEXTS.map(lambda url: {"type": "image_url", "image_url": {"url": url}}),
    MEDIA_TEXTS.map(lambda url: {"type": "video_url", "video_url": url}),
    (base64_texts() | MEDIA_TEXTS).map(
        lambda data: {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    ),
    MEDIA_TEXTS.map(
        lambda url: {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "x": url}
    ),
    TEXTS.map(lambda text: {"type": "text", "text": text}),
    TEXTS,
    st.builds(lambda key, value: {"type": "text", "text": "x", key: value}, TEXTS, TEXTS),
    base64_texts().map(lambda data: {"type": "image_url", "image_url": {"url": {"data": data}}}),
    base64_texts().map(lambda data: {"type": "text", "text": "x", "data": data}),
)
CHAT_MESSAGES = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "user", "user", "assistant", "tool", "nobody", None]),
    st.lists(PARTS, max_size=4) | TEXTS,
)
BODIES = st.builds(
    lambda messages, extra: {"model": "m", "messages": messages, **extra},
    st.lists(CHAT_MESSAGES, min_size=1, max_size=3),
    st.just({})
    | st.just({})
    | st.dictionaries(TEXTS | st.just("data"), TEXTS, max_size=2)
    | st.just({"n": 0.5}),
)

BLOCKS = st.one_of(
    base64_texts().map(lambda data: {"type": "image", "source": {"type": "base64", "data": data}}),
    MEDIA_TEXTS.map(lambda url: {"type": "image", "source": {"type": "url", "url": url}}),
    MEDIA_TEXTS.map(lambda url: {"type": "image", "source": {"url": url, "data": "AAAA"}}),
    TEXTS.map(lambda text: {"type": "text", "text": text}),
    base64_texts().map(lambda data: {"type": "redacted_thinking", "data": data}),
    base64_texts().map(lambda data: {"type": "tool_use", "id": "t", "name": "f", "input": {"data": data}}),
)
RESULTS = st.lists(BLOCKS, max_size=3).map(lambda content: {"type": "tool_result", "content": content})
MESSAGES_BODIES = st.builds(
    lambda messages, extra: {"model": "m", "messages": messages, **extra},
    st.lists(
        st.builds(
            lambda role, content: {"role": role, "content": content},
            st.sampled_from(["user", "user", "user", "assistant", "system"]),
            st.lists(BLOCKS | RESULTS, max_size=4) | TEXTS,
        ),
        min_size=1,
        max_size=3,
    ),
    st.just({}) | TEXTS.map(lambda text: {"system": text}),
)


@st.composite
def raw_bodies(draw: st.DrawFn, bodies: st.SearchStrategy[dict[str, Any]] = BODIES) -> bytes:
    body = draw(bodies)
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", "\n:\t ")]))
    text = json.dumps(body, ensure_ascii=draw(st.booleans()), separators=separators)
    way = draw(st.sampled_from([*["plain"] * 6, "slashes", "unicode", "cut", "insert", "twice", "tail"]))
    if way == "slashes":
        text = text.replace("/", "\\/")
    elif way == "unicode":
        text = text.replace("+", "\\u002b", draw(st.integers(1, 3)))
    raw = text.encode()
    at = draw(st.integers(0, len(raw)))
    if way == "cut":
        return raw[:at]
    if way == "insert":
        return (
            raw[:at]
            + draw(st.sampled_from([b'"', b"\\", b"\x00", b"\xff", b'"data:', b"[", b","]))
            + raw[at:]
        )
    if way == "twice":  # a key of an object: the last one counts
        other = json.dumps(draw(MEDIA_TEXTS)).encode()
        return raw.replace(b'"url":', b'"url":' + other + b',"url":', 1)
    return raw + b" }" if way == "tail" else raw


@st.composite
def cut_bodies(
    draw: st.DrawFn, bodies: st.SearchStrategy[dict[str, Any]] = BODIES
) -> tuple[bytes, list[int]]:
    raw = draw(raw_bodies(bodies))
    return raw, sorted(draw(st.lists(st.integers(0, len(raw)), max_size=12)))


@settings(max_examples=examples(400), suppress_health_check=list(HealthCheck))
@given(case=cut_bodies())
def test_split_is_as_whole(parser: RequestParser, case: tuple[bytes, list[int]]) -> None:
    raw, cuts = case
    assert read_split(parser, raw, cuts) == read_whole(raw)


@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck))
@given(case=cut_bodies(MESSAGES_BODIES))
def test_split_is_as_whole_in_the_messages_api(parser: RequestParser, case: tuple[bytes, list[int]]) -> None:
    raw, cuts = case
    assert read_split(parser, raw, cuts, MESSAGES) == read_whole(raw, MESSAGES)


def test_media_of_the_messages_api_are_not_held_as_text(parser: RequestParser) -> None:
    media = bytes(range(256)) * 20
    image = {"type": "image", "source": {"type": "base64", "data": base64.b64encode(media).decode()}}
    content = [image, {"type": "tool_result", "content": [image]}]
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    body = split(raw, [1000, 9000])
    assert (len(body.media_by_text()), body.is_odd) == (2, False)
    request = asyncio.run(parser.parse(body, pytest.fail, MESSAGES))  # without being put back
    assert [part.content for part in request.media] == [media, media]
    assert [len(part.place) for part in request.media] == [6, 4]


@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck))
@given(case=cut_bodies())
def test_what_is_put_back_is_what_was_sent(case: tuple[bytes, list[int]]) -> None:
    raw, cuts = case
    assert split(raw, cuts).put_back() == raw


GOOD_IMAGE = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 20).decode()


def image_body(**fields: Any) -> bytes:
    part = {"type": "image_url", "image_url": {"url": GOOD_IMAGE}}
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": [part, "x"]}], **fields}
    ).encode()


def test_every_byte_apart(parser: RequestParser) -> None:
    raw = image_body()
    assert read_split(parser, raw, list(range(1, len(raw)))) == read_whole(raw)


LONG = "A" * MIN_MEDIA_BYTES
HEAD = "data:image/png;base64,"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": HEAD + LONG, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": LONG, "format": "wav"}},
        {"type": "image_url", "image_url": {"url": {"data": LONG}}},
        {"type": "image_url", "image_url": {"data": LONG}},
        {"type": "video_url", "video_url": {"url": HEAD + LONG}},
        {"type": "image_url", "image_url": {"url": f"{HEAD}{LONG}AA=={LONG}"}},
        {"type": "image_url", "image_url": {"url": f"{HEAD}{LONG}AA=="}},
        {"type": "image_url", "image_url": {"url": f"{HEAD}{LONG}===="}},
        {"type": "image_url", "image_url": {"url": f"{HEAD}{LONG}A"}},
        {"type": "image_url", "image_url": {"url": f"{HEAD} {LONG}"}},
        {"type": "image_url", "image_url": {"url": HEAD + LONG * 3}},
        {"type": "image_url", "image_url": {"url": HEAD + LONG}, "text": HEAD + LONG},
        {"type": "text", "text": f'x "{HEAD}{LONG}'},
        {"type": "text", "text": f'x "{HEAD}{LONG}" y'},
        {"type": "text", "text": "x", HEAD + LONG: "y"},
        {"type": "text", "text": "x", "data": LONG},
        {"type": "text", "text": "x", 'a"data': LONG},
    ],
    ids=lambda part: part["type"],
)
def test_each_piece_may_end_anywhere(parser: RequestParser, part: dict[str, Any]) -> None:
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]}).encode()
    for cuts in ([], list(range(1, len(raw))), list(range(3, len(raw), 7)), list(range(0, len(raw), 4096))):
        assert read_split(parser, raw, cuts) == read_whole(raw)


def test_media_are_not_held_as_text() -> None:
    """What is held is what they decode to, and the rest of the body."""
    raw = image_body()
    body = split(raw, list(range(100, len(raw), 100)))
    (item,) = body.media_by_text().values()
    assert (item.content, body.is_odd) == (bytes(range(256)) * 20, False)
    assert item.num_chars == len(GOOD_IMAGE)
    assert item.digest == blake3(item.content).hexdigest()
    assert len(body.text) < len(raw) - len(GOOD_IMAGE) + 80
    assert b"AAECAwQ" not in body.text


def test_a_marker_is_not_known_before() -> None:
    first, second = (split(image_body(), []) for _ in range(2))
    assert first.media_by_text().keys().isdisjoint(second.media_by_text())


def test_a_text_that_is_a_data_url_is_the_same_text() -> None:
    raw = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": GOOD_IMAGE}]}]}
    )
    with ThreadPoolExecutor(1) as threads:
        parser = RequestParser(GUARD, LIMITS, RequestOptions(), threads)
        request = asyncio.run(parser.parse(split(raw.encode(), [5000]), lambda num_bytes: None))
    assert request.body["messages"][0]["content"] == [{"type": "text", "text": GOOD_IMAGE}]


def test_a_body_that_must_be_put_back_books_its_own_size(parser: RequestParser) -> None:
    booked: list[int] = []
    raw = image_body(user=GOOD_IMAGE)
    asyncio.run(parser.parse(split(raw, []), booked.append))
    assert booked == [len(raw)]
    booked.clear()
    asyncio.run(parser.parse(split(image_body(), []), booked.append))
    assert booked == []


@pytest.mark.parametrize("text", [b'"data:"', b'\\"data:', b'"data":"x"'])
def test_strings_that_begin_like_media_are_looked_at_in_bounded_number(text: bytes) -> None:
    few, many = (split(b"[" + text * number, []) for number in (MAX_OTHER, 100_000))
    assert not few.is_odd
    assert many.is_odd
    assert many.put_back() == b"[" + text * 100_000


@given(groups=st.lists(st.binary(min_size=4, max_size=4), max_size=3), at=st.integers(0, 5000))
@example(groups=[b"AA=="], at=4000)
@example(groups=[b"===="], at=5000)
def test_the_decoder_takes_what_binascii_takes(groups: list[bytes], at: int) -> None:
    plain = base64.b64encode(random.Random(at).randbytes(3750))
    data = plain[: at // 4 * 4] + b"".join(groups) + plain[at // 4 * 4 :]
    try:
        expected: bytes | None = binascii.a2b_base64(data, strict_mode=True)
    except binascii.Error:
        expected = None
    decoder = Base64Decoder()
    pieces = [data[start : start + 1000] for start in range(0, len(data), 1000)]
    if all(map(decoder.feed, pieces)) and decoder.finish() is not None:
        assert decoder.take() == expected
    else:
        assert expected is None or data.count(b"=") > 2  # more padding than is of use, which it takes


@pytest.mark.parametrize("state", SplitState)
def test_no_other_steps(state: SplitState) -> None:
    for to in set(SplitState) - ALLOWED[state]:
        splitter = BodySplitter()
        splitter._state = state
        with pytest.raises(IllegalTransitionError):
            splitter._enter(to)
