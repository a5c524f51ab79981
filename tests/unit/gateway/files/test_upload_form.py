"""A multipart body gives the same file and fields, however it is cut into pieces; bad ones are refused."""

import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych_common.domain.errors import RequestError
from triptych_gateway.files.upload_form import (
    ANCHOR_FIELD,
    MAX_FORM_BYTES,
    SECONDS_FIELD,
    UploadForm,
    lifetime_of,
    purpose_of,
)
from triptych_gateway.settings import FileSettings

TYPE = 'multipart/form-data; boundary="-b-"'
LIMITS = FileSettings(files_lifetime_s=100, files_max_lifetime_s=1000)
CONTENT = b"\r\n---b\r\n--\r\n\r\n" + os.urandom(300) + b"\r\n---b"  # much like a boundary


def body_of(*parts: tuple[str, bytes]) -> bytes:
    named = (f"---b-\r\nContent-Disposition: form-data; {rest}\r\n\r\n".encode() + c for rest, c in parts)
    return b"\r\n".join([*named, b"---b---\r\n"])


BODY = body_of(('name="purpose"', b"user_data"), ('name="file"; filename="a\\"b.png"', CONTENT))


def feed(pieces: list[bytes]) -> tuple[UploadForm, bytes]:
    form = UploadForm.of_content_type(TYPE)
    content = b"".join(each for piece in pieces for each in form.feed(piece))
    form.finish()
    return form, content


@given(st.lists(st.integers(1, len(BODY) - 1), max_size=20))
def test_it_may_be_cut_anywhere(cuts: list[int]) -> None:
    edges = [0, *sorted(set(cuts)), len(BODY)]
    form, content = feed([BODY[start:end] for start, end in pairwise(edges)])
    assert content == CONTENT
    assert form.filename == 'a"b.png'
    assert form.fields == {"purpose": "user_data"}


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        ('name="file"', "upload"),
        ('name="file"; filename=""', "upload"),
        ('name="file"; filename="../../etc/passwd"', "../../etc/passwd"),
        ('name="file"; filename="a\tb\u0085c"', "abc"),
        ('name="file"; filename="ü😀.png"', "ü😀.png"),
        ('name="file"; filename="' + "x" * 1000 + '"', "x" * 255),
    ],
)
def test_what_is_kept_of_a_name(disposition: str, name: str) -> None:
    form, _ = feed([body_of((disposition, b"x"))])
    assert form.filename == name


def refused(content: bytes, content_type: str = TYPE) -> str:
    def read() -> None:
        form = UploadForm.of_content_type(content_type)
        form.feed(content)
        form.finish()

    with pytest.raises(RequestError) as raised:
        read()
    assert raised.value.status_code == 400
    return raised.value.code


def test_a_form_is_bounded_beside_its_file() -> None:
    many = [(f'name="{number}"', b"") for number in range(17)]
    for parts in (
        many,
        [('name="x"', b"x" * 1025)],
        [('name="x"', b""), ('name="x"', b"")],
        [('name="file"', b"x"), ('name="file"', b"x")],
        [(f'name="{"x" * 5000}"', b"")],
        [('name="x"' + "\r\nA: b" * 10, b"")],
    ):
        assert refused(body_of(*parts, ('name="purpose"', b""))) == "invalid_multipart"
    assert MAX_FORM_BYTES < 1 << 20


def form_with(**fields: str) -> UploadForm:
    form = UploadForm.of_content_type(TYPE)
    form.fields.update(fields)
    return form


def test_purposes() -> None:
    assert purpose_of(form_with(purpose="vision")) == "vision"
    for fields, code in (({}, "missing_field"), ({"purpose": "batch"}, "invalid_value")):
        with pytest.raises(RequestError) as raised:
            purpose_of(form_with(**fields))
        assert (raised.value.code, raised.value.param) == (code, "purpose")


def test_lifetimes() -> None:
    anchored = {ANCHOR_FIELD: "created_at"}
    assert lifetime_of(form_with(), LIMITS) == 100
    assert lifetime_of(form_with(**anchored, **{SECONDS_FIELD: "1000"}), LIMITS) == 1000
    for fields, param in (
        (anchored, SECONDS_FIELD),
        ({SECONDS_FIELD: "5"}, ANCHOR_FIELD),
        ({ANCHOR_FIELD: "last_active_at", SECONDS_FIELD: "5"}, ANCHOR_FIELD),
        *(({**anchored, SECONDS_FIELD: bad}, SECONDS_FIELD) for bad in ("0", "1001", "-5", "1.5", "٣", "")),
    ):
        with pytest.raises(RequestError) as raised:
            lifetime_of(form_with(**fields), LIMITS)
        assert (raised.value.code, raised.value.param) == ("invalid_value", param)


@pytest.mark.parametrize(
    "content",
    [
        body_of(('name="file"', b"\r\n---b-x" * 40)),  # each is looked at byte by byte
        b"\r\n" * MAX_FORM_BYTES,
        body_of(('name="x"', b"")).removesuffix(b"--\r\n") + b" " * MAX_FORM_BYTES,
    ],
)
def test_what_costs_more_time_than_a_files_content_is_bounded(content: bytes) -> None:
    """It is refused before its end."""
    with pytest.raises(RequestError) as raised:
        UploadForm.of_content_type(TYPE).feed(content)
    assert raised.value.code == "invalid_multipart"
