from typing import Any

import pytest

from triptych_common.domain.hashing import media_digest, mm_hash, namespace_digest, plain_item_hash

BASE: dict[str, Any] = {
    "modality": "image",
    "media_digest": media_digest(b"bytes"),
    "namespace_digest": "ns",
    "processor_options": {"a": 1, "b": [1, 2]},
    "media_io_options": {},
    "tenant_salt": "",
}


def test_known_values_do_not_drift() -> None:
    """Hashes live in stores and caches longer than a process: a change of these makes them all miss."""
    assert namespace_digest({"weights": "w", "dtype": "bfloat16"}) == KNOWN_NAMESPACE
    assert mm_hash(**BASE) == KNOWN_ITEM


KNOWN_NAMESPACE = "7eb7d09d42cc120a3bd1589b72b06404831389ae476c4d57636b40dad0bb8783"
KNOWN_ITEM = "c7a4aa78e2e602442de3c43761ec91b94503a7e65eb87bdb25bd413299143f24"


def test_order_of_options_does_not_matter() -> None:
    assert mm_hash(**{**BASE, "processor_options": {"b": [1, 2], "a": 1}}) == mm_hash(**BASE)
    assert namespace_digest({"a": "1", "b": "2"}) == namespace_digest({"b": "2", "a": "1"})


@pytest.mark.parametrize(
    "change",
    [
        {"modality": "video"},
        {"media_digest": media_digest(b"byteS")},
        {"namespace_digest": "ns2"},
        {"processor_options": {"a": 1}},
        {"processor_options": {}, "media_io_options": {"a": 1, "b": [1, 2]}},
        {"media_io_options": {"a": 1}},
        {"piece_rows": 1024},
        {"tenant_salt": "t"},
        {"namespace_digest": "n", "modality": "images"},
        {"media_digest": "", "tenant_salt": "bytes"},
    ],
)
def test_everything_that_changes_the_result_changes_the_hash(change: dict[str, Any]) -> None:
    assert mm_hash(**{**BASE, **change}) != mm_hash(**BASE)


def test_parts_cannot_run_into_each_other() -> None:
    assert namespace_digest({"ab": "c"}) != namespace_digest({"a": "bc"})
    assert namespace_digest({"a": "b", "c": "d"}) != namespace_digest({"a": "bcd"})


def test_options_must_be_json() -> None:
    with pytest.raises(ValueError):
        mm_hash(**{**BASE, "media_digest": "no digest"})
    with pytest.raises(TypeError):
        mm_hash(**{**BASE, "processor_options": {"a": object()}})


def test_items_that_vllm_named_are_apart_by_namespace() -> None:
    hashes = {
        plain_item_hash(*parts) for parts in (("n", "a"), ("n", "b"), ("m", "a"), ("na", ""), ("", "na"))
    }
    assert len(hashes) == 5
    assert all(len(each) == 64 for each in hashes)
