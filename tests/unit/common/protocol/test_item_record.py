"""Records of items: what they hold, and what no record can be."""

import zlib
from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.item_records import item_record
from triptych_common.protocol.item_record import (
    MAX_ARRAY_BYTES,
    MAX_PACKED_CHARS,
    Batching,
    ItemRecord,
    PackedArray,
    PlaceholderUpdate,
    RecordField,
)


def packed(content: bytes) -> str:
    return b64encode(zlib.compress(content)).decode()


@given(st.binary(max_size=200))
def test_an_array_is_unpacked_as_it_was_packed(content: bytes) -> None:
    array = PackedArray.pack("uint8", (len(content),), content)
    assert PackedArray.model_validate_json(array.model_dump_json()).unpack() == content


def test_what_repeats_itself_takes_few_bytes() -> None:
    assert len(item_record(16_384).model_dump_json()) < 500


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(packed(b"x" * 7), id="shorter"),
        pytest.param(packed(b"x" * 9), id="longer"),
        pytest.param(packed(b"x" * (64 << 20)), id="a bomb"),
        pytest.param(b64encode(b"no stream").decode(), id="not compressed"),
        pytest.param("QQ=", id="not base64"),
        pytest.param("", id="nothing"),
    ],
)
def test_an_array_that_is_not_what_its_shape_says_is_refused(data: str) -> None:
    with pytest.raises(ValueError, match="array"):
        PackedArray(dtype="int64", shape=(1,), data=data).unpack()


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("uint8", (MAX_ARRAY_BYTES + 1,), ""),
        ("int64", (1 << 40, 1 << 40), ""),
        ("uint8", (-1,), ""),
        ("uint8", (1, 1, 1, 1, 1), ""),
        ("object", (1,), ""),
        ("uint8", (1,), "A" * (MAX_PACKED_CHARS + 1)),
        ("uint8", (1,), "\x00"),
    ],
)
def test_an_array_beyond_its_bounds_is_refused(dtype: str, shape: tuple[int, ...], data: str) -> None:
    with pytest.raises(ValidationError):
        PackedArray.model_validate({"dtype": dtype, "shape": shape, "data": data})


def test_placeholders_without_a_mask_are_all_embeddings() -> None:
    (update,) = item_record(5).updates
    assert update.num_embeds() == 5


def test_a_mask_tells_embeddings_from_other_tokens() -> None:
    tokens = PackedArray.pack("int32", (3,), bytes(12))
    update = PlaceholderUpdate(
        mode="replace", target=(1,), tokens=tokens, is_embed=PackedArray.pack("bool", (3,), b"\1\0\1")
    )
    assert update.num_embeds() == 2


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": PackedArray.pack("int64", (1,), bytes(8))},
        {"tokens": PackedArray.pack("int32", (1, 1), bytes(4))},
        {"is_embed": PackedArray.pack("bool", (2,), bytes(2))},
        {"is_embed": PackedArray.pack("uint8", (1,), bytes(1))},
        {"target": ()},
        {"target": (-1,)},
        {"mode": "delete"},
    ],
)
def test_an_update_of_another_form_is_refused(change: dict[str, object]) -> None:
    (update,) = item_record(1).updates
    with pytest.raises(ValidationError):
        PlaceholderUpdate.model_validate({**dict(update), **change})


@pytest.mark.parametrize("name", ["", "__class__", "A", "a.b", "a" * 65])
def test_a_field_has_a_plain_name(name: str) -> None:
    with pytest.raises(ValidationError):
        RecordField(name=name, batching=Batching.SHARED, value=1)


@pytest.mark.parametrize("change", [{"version": 2}, {"updates": ()}, {"more": 1}])
def test_a_record_of_another_version_or_form_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ItemRecord.model_validate({**dict(item_record(1)), **change})
