"""What is counted on a body's bytes is what its parser makes."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from triptych_common.domain.errors import RequestError
from triptych_gateway.request.body_bounds import MAX_DEPTH, MIN_MEDIA_BYTES, check_bounds, count_values
from triptych_gateway.settings import RequestSettings

NASTY = st.text(alphabet='"\\[]{},: adt/\n\té\U0001f600', max_size=12)
MEDIA = st.sampled_from(
    ["data:", "data:" + "A" * MIN_MEDIA_BYTES, "data:,[]" * 1000, "data:" + "\\" * 5000, "data:é" * 2000]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | NASTY
    | MEDIA
)
VALUES = st.recursive(
    SCALARS,
    lambda child: st.lists(child, max_size=6) | st.dictionaries(NASTY | MEDIA, child, max_size=6),
    max_leaves=60,
)
SPACES = st.sampled_from(["", " ", "\n\t ", " " * 9])


def values_of(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(values_of, children))


def depth_of(value: Any) -> int:
    if not isinstance(value, (dict, list)):
        return 0
    return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)


def is_accepted(raw: bytes, max_values: int) -> bool:
    try:
        check_bounds(raw, RequestSettings(max_prompt_bytes=1 << 30, max_body_values=max_values))
    except RequestError:
        return False
    return True


def written(value: Any, space: str, *, is_ascii: bool, escapes_slash: bool) -> bytes:
    text = json.dumps(value, ensure_ascii=is_ascii, separators=(f"{space},{space}", f"{space}:{space}"))
    text = text.replace("[]", f"[{space}]").replace("{}", f"{{{space}}}") if '"' not in text else text
    return (text.replace("/", "\\/") if escapes_slash else text).encode()


@settings(max_examples=examples(200))
@given(value=VALUES, space=SPACES, is_ascii=st.booleans(), escapes_slash=st.booleans())
def test_the_bound_is_exact(value: Any, space: str, *, is_ascii: bool, escapes_slash: bool) -> None:
    raw = written(value, space, is_ascii=is_ascii, escapes_slash=escapes_slash)
    num_values = values_of(value)
    assert values_of(orjson.loads(raw)) == num_values
    assert is_accepted(raw, num_values)
    if num_values > 1:
        assert not is_accepted(raw, num_values - 1)


@settings(max_examples=examples(50))
@given(depth=st.integers(MAX_DEPTH - 3, MAX_DEPTH + 3), brackets=st.sampled_from(["[]", "{}"]))
def test_the_depth_is_exact(depth: int, brackets: str) -> None:
    opened = '{"a":' if brackets == "{}" else "["
    text = opened * (depth - 1) + brackets + ("}" if brackets == "{}" else "]") * (depth - 1)
    assert depth_of(json.loads(text)) == depth
    assert is_accepted(text.encode(), 10_000) == (depth <= MAX_DEPTH)


@given(raw=st.binary(max_size=200), max_values=st.integers(1, 20))
def test_what_is_no_json_ends_too(raw: bytes, max_values: int) -> None:
    is_accepted(raw, max_values)


@given(text=NASTY, num_media=st.integers(0, 5), num_text=st.integers(0, 3000))
def test_only_the_prompt_counts_as_text(text: str, num_media: int, num_text: int) -> None:
    media = "data:image/png;base64," + "A" * MIN_MEDIA_BYTES
    raw = orjson.dumps([text, *[media] * num_media, "x" * num_text, text])
    num_prompt = len(raw) - num_media * (len(media) + 2)
    check_bounds(raw, RequestSettings(max_prompt_bytes=num_prompt))
    with pytest.raises(RequestError) as caught:
        check_bounds(raw, RequestSettings(max_prompt_bytes=num_prompt - 1))
    assert (caught.value.status_code, caught.value.code) == (413, "prompt_too_large")


def test_a_long_string_that_is_not_ascii_is_no_media() -> None:
    """Python would store each of its characters with four bytes."""
    raw = orjson.dumps(["data:" + "\U0001f600" * 5000])
    with pytest.raises(RequestError):
        check_bounds(raw, RequestSettings(max_prompt_bytes=10_000))


def test_commas_in_a_text_are_no_values() -> None:
    raw = orjson.dumps([",[{" * 100_000])
    assert count_values(raw, 10) == 2


def test_empty_lists_without_commas_are_counted() -> None:
    """That is no JSON, and the count would be the dearer part."""
    bounds = RequestSettings(max_body_values=1000)
    check_bounds(b"[" + b"[]," * 998 + b"[]]", bounds)
    for text in (b"[]" * 1001, b"{}" * 1001, b"[ ]" * 1001):
        with pytest.raises(RequestError) as caught:
            check_bounds(text, bounds)
        assert (caught.value.status_code, caught.value.code) == (400, "body_too_complex")


def test_what_begins_like_media_is_checked_in_bounded_time() -> None:
    bounds = RequestSettings(max_prompt_bytes=MIN_MEDIA_BYTES, max_body_values=10)
    media = b'"data:' + b"A" * MIN_MEDIA_BYTES + b'"'
    check_bounds(b'["' + b'\\"data:' * 19 + b'",' + media + b"]", bounds)
    with pytest.raises(RequestError) as caught:
        check_bounds(b'"data:' * 21 + media, bounds)
    assert (caught.value.status_code, caught.value.code) == (413, "prompt_too_large")


@pytest.mark.parametrize("scheme", ["data:", "DATA:", "Data:", "dAtA:"])
def test_media_are_known_by_their_scheme_in_any_case(scheme: str) -> None:
    raw = orjson.dumps([scheme + "image/png;base64," + "A" * 3 * MIN_MEDIA_BYTES])
    check_bounds(raw, RequestSettings(max_prompt_bytes=10))
