"""Positions of an item in pieces are those of the item: by vLLM's own code, for a Qwen2.5-VL."""

import warnings
from typing import Any

import torch

with warnings.catch_warnings(action="ignore"):  # importing vLLM's models warns, of torch's own use of torch
    from transformers import Qwen2_5_VLConfig
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    from triptych_vllm_connector.pieces import divide_feature, place_items_whole
    from triptych_vllm_connector.records.positions import outline_of

VIDEO = "a" * 64
FIELD = MultiModalBatchedField(keep_on_cpu=True)


def video(offset: int) -> MultiModalFeatureSpec:
    """Four steps of 2 x 3 rows, two seconds each."""
    fields = {
        "video_grid_thw": MultiModalFieldElem(data=torch.tensor([4, 4, 6]), field=FIELD),
        "second_per_grid_ts": MultiModalFieldElem(data=torch.tensor(2.0), field=FIELD),
    }
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem(fields),
        modality="video",
        identifier=VIDEO,
        mm_position=PlaceholderRange(offset=offset, length=24),
        mm_hash=VIDEO,
    )


def test_positions_are_those_of_the_whole_item() -> None:
    model: Any = outline_of(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig())
    prompt = [1] * 60
    items = [video(2), video(30)]
    expected = model.get_mrope_input_positions(prompt, items)
    pieces = [part for each in items for part in divide_feature(each, (6, 12, 6))]
    place_items_whole(model)
    for features in (pieces, items):
        positions, delta = model.get_mrope_input_positions(prompt, features)
        assert torch.equal(positions, expected[0])
        assert delta == expected[1]


def test_a_model_without_such_positions_stays_as_it_is() -> None:
    model = torch.nn.Identity()
    place_items_whole(model)
    assert not hasattr(model, "get_mrope_input_positions")
