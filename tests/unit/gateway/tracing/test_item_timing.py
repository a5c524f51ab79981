"""What is said of one item: when, how large, and whether an encode was avoided."""

import pytest

from triptych_gateway.tracing.timings import ItemSource, ItemTiming


def test_an_item_that_is_encoded() -> None:
    item = ItemTiming("image", 1000)
    item.on_ordered(1.0)
    item.on_sizes(64, 1.2)
    item.on_sizes(64, 9.0)  # again: the first counts
    item.on_sealed("encoder-1", 0.3, 1.6)
    assert item.as_json(0.5) == {
        "modality": "image", "num_bytes": 1000, "num_places": 1, "num_rows": 64, "source": "encoded",
        "ordered_ms": 500.0, "sized_ms": 700.0, "sealed_ms": 1100.0, "encode_ms": 300.0,
        "encoder": "encoder-1", "encode_store": None, "encode_place": None,
    }  # fmt: skip


@pytest.mark.parametrize("source", [ItemSource.MEMORY, ItemSource.REDIS])
def test_known_sizes_need_no_encode_unless_the_tensor_is_gone(source: ItemSource) -> None:
    item = ItemTiming("image", 1)
    item.on_known(source)
    assert item.source is source
    item.on_ordered(1.0)  # prefill_decode lacks it
    assert item.source is ItemSource.ENCODED


def test_the_store_had_it() -> None:
    item = ItemTiming("image", 1)
    item.on_ordered(1.0)
    item.on_sealed("encoder-0", 0.0, 1.1)
    assert item.source is ItemSource.STORE


def test_another_requests_encode_stays_the_others() -> None:
    item = ItemTiming("image", 1)
    item.on_joined(0.9)
    assert item.ordered_at == 0.9
    item.on_ordered(1.0)
    item.on_sealed("encoder-0", 0.2, 1.5)
    assert item.source is ItemSource.JOINED
