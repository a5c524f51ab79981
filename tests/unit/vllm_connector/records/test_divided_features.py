"""prefill_decode's host: the prompt has an item, and the engine gets the pieces that its record names."""

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.item_records import item_record
from triptych_common.protocol.messages import ECTransferParams, ItemTransfer, Modality

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    from triptych_vllm_connector.pieces import piece_hashes
    from triptych_vllm_connector.records.positions import PositionCheck
    from triptych_vllm_connector.records.replaying import MetadataOnly, RecordedItems, _divide_items_of

VIDEO, IMAGE = "a" * 64, "b" * 64
ROWS = (4, 2)
ELEMENT = MultiModalFieldElem(data=torch.zeros(1), field=MultiModalBatchedField())


def transfer(mm_hash: str, num_embeds: int, pieces: tuple[int, ...]) -> ItemTransfer:
    record = item_record(num_embeds).model_copy(update={"pieces": pieces})
    return ItemTransfer(
        item_index=0, mm_hash=mm_hash, modality=Modality.VIDEO, num_embeds=num_embeds, record=record
    )


@pytest.fixture
def params() -> dict[str, Any]:
    """As the engine gets them."""
    items = (transfer(IMAGE, 3, ()), transfer(VIDEO, sum(ROWS), ROWS))
    whole = ECTransferParams(request_id="r", gateway="g", remaining_ms=1, items=items)
    return whole.without_records().model_dump(mode="json")


@pytest.fixture
def processor() -> Iterator[Any]:
    """vLLM's `InputProcessor`, which makes a request of an image and a video."""

    def process_inputs(extra_args: Any) -> Any:
        features = [
            MultiModalFeatureSpec(None, "image", IMAGE, PlaceholderRange(offset=1, length=3), IMAGE),
            MultiModalFeatureSpec(None, "video", VIDEO, PlaceholderRange(offset=5, length=6), VIDEO),
        ]
        return SimpleNamespace(mm_features=features, sampling_params=SimpleNamespace(extra_args=extra_args))

    with ThreadPoolExecutor(1) as pool:
        renderer = SimpleNamespace(_executor=pool)
        made = SimpleNamespace(process_inputs=process_inputs, process_inputs_async=None, renderer=renderer)
        _divide_items_of(made)
        yield made


async def test_the_engine_gets_a_feature_for_each_piece(processor: Any, params: dict[str, Any]) -> None:
    for request in (
        processor.process_inputs({"ec_transfer_params": params}),
        await processor.process_inputs_async({"ec_transfer_params": params}),
    ):
        assert [each.identifier for each in request.mm_features] == [IMAGE, *piece_hashes(VIDEO, ROWS)]
        assert [each.mm_hash for each in request.mm_features] == [IMAGE, VIDEO, VIDEO]
        positions = [each.mm_position for each in request.mm_features]
        assert [(each.offset, each.length) for each in positions] == [(1, 3), (5, 4), (9, 2)]


@pytest.mark.parametrize("extra_args", [None, {}, {"ec_transfer_params": {"items": [{"pieces": [1]}]}}])
def test_without_valid_parameters_nothing_is_divided(processor: Any, extra_args: Any) -> None:
    request = processor.process_inputs(extra_args)
    assert [each.identifier for each in request.mm_features] == [IMAGE, VIDEO]


@pytest.mark.parametrize("pieces", [(4, 3), (5,), (6, 6)])
def test_pieces_of_other_rows_are_refused_before_the_engine_sees_them(pieces: tuple[int, ...]) -> None:
    cache = RecordedItems(PositionCheck(None), vocab_size=1000, max_num_tokens=100)
    cache.items = {VIDEO: transfer(VIDEO, sum(ROWS), pieces)}
    with pytest.raises(ValueError, match="pieces"):
        cache.get_and_update_item(None, VIDEO)
    cache.items = {VIDEO: transfer(VIDEO, sum(ROWS), ROWS)}
    cache.get_and_update_item(None, VIDEO)


def test_an_engine_that_encodes_nothing_gets_no_pixels() -> None:
    fields = ("pixel_values", "image_grid_thw", "second_per_grid_ts")
    data = MultiModalKwargsItem(dict.fromkeys(fields, ELEMENT))
    feature = MultiModalFeatureSpec(data, "image", IMAGE, PlaceholderRange(offset=1, length=3), IMAGE)
    stripped = MetadataOnly({"image": {"image_grid_thw"}}.__getitem__).strip(feature)
    assert list(stripped.data) == ["image_grid_thw", "second_per_grid_ts"]
    assert (stripped.identifier, stripped.mm_position) == (feature.identifier, feature.mm_position)
    assert tuple(feature.data) == fields
