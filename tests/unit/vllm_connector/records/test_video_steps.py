"""Videos as steps of their grid: cut, repeated, refused where it is not known what belongs to which step."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych_common.protocol.item_record import MAX_PIECES

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalKwargsItem,
        MultiModalSharedField,
    )

    from triptych_vllm_connector.records.video_steps import (
        NotInStepsError,
        cut_steps,
        num_steps,
        repeat_step,
        steps_of_pieces,
    )

BATCHED, FLAT = MultiModalBatchedField(), MultiModalFlatField(slices=[slice(None)])
SHARED = MultiModalSharedField(batch_size=1)
STEPS, CELLS = 3, 4


def video(**fields: tuple[Any, Any]) -> MultiModalKwargsItem:
    """Three steps of two by two patches of five numbers; `fields`: data and batching of others."""
    patches = torch.arange(STEPS * CELLS * 5, dtype=torch.float32).reshape(STEPS * CELLS, 5)
    all_fields = {
        "pixel_values_videos": (patches, FLAT),
        "video_grid_thw": (torch.tensor([STEPS, 2, 2]), BATCHED),
        **fields,
    }
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(data=data, field=field) for name, (data, field) in all_fields.items()}
    )


def test_a_cut_video_has_its_steps_alone() -> None:
    whole = video(
        timestamps=([0.5, 1.5, 2.5], BATCHED),
        second_per_grid_ts=(torch.tensor(1.0), BATCHED),
        use_audio_in_video=(torch.tensor(False), SHARED),
    )
    assert num_steps(whole) == STEPS
    cut = cut_steps(whole, 1, 3)
    assert cut["video_grid_thw"].data.tolist() == [2, 2, 2]
    assert torch.equal(cut["pixel_values_videos"].data, whole["pixel_values_videos"].data[CELLS:])
    assert cut["timestamps"].data == [1.5, 2.5]
    assert cut["second_per_grid_ts"].data == 1.0
    assert whole["video_grid_thw"].data.tolist() == [STEPS, 2, 2], "the whole is as it was"


def test_a_repeated_step_is_a_video() -> None:
    repeated = repeat_step(video(timestamps=([0.5, 1.5, 2.5], BATCHED)), 4)
    assert num_steps(repeated) == 4
    assert repeated["timestamps"].data == [0.5] * 4
    last, first = cut_steps(repeated, 3, 4), cut_steps(video(), 0, 1)
    assert torch.equal(last["pixel_values_videos"].data, first["pixel_values_videos"].data)


@pytest.mark.parametrize(
    "fields",
    [
        {"video_grid_thw": (torch.tensor([STEPS, 2, 3]), BATCHED)},
        {"video_grid_thw": (torch.tensor([STEPS, 4]), BATCHED)},
        {"image_grid_thw": (torch.tensor([1, 2, 2]), BATCHED)},
        {"pixel_values_videos": (torch.zeros(STEPS * CELLS, 5), BATCHED)},
        {"timestamps": ([0.5, 1.5], BATCHED)},
        {"sizes": (torch.tensor([[1, 2], [3, 4]]), BATCHED)},
        {"frames": (torch.zeros(STEPS, 5), FLAT)},
        {"use_audio_in_video": (torch.tensor(True), SHARED)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_not_known_to_be_in_steps_is_refused(fields: dict[str, tuple[Any, Any]]) -> None:
    with pytest.raises(NotInStepsError):
        cut_steps(video(**fields), 0, 1)


@given(st.integers(1, 5000), st.integers(1, 3000), st.integers(1, 10_000))
def test_pieces_are_of_all_steps_and_none_is_small(num: int, rows_of_step: int, piece_rows: int) -> None:
    steps = steps_of_pieces(num, rows_of_step, piece_rows)
    assert sum(steps) == num
    assert len(steps) <= MAX_PIECES
    assert max(steps) - min(steps) <= 1
    assert len(steps) == 1 or min(steps) * rows_of_step >= piece_rows


def test_a_short_video_stays_one_piece() -> None:
    assert steps_of_pieces(8, 100, 1024) == [8]
    assert steps_of_pieces(22, 100, 1024) == [11, 11]
    assert steps_of_pieces(4, 2000, 1024) == [1, 1, 1, 1]
