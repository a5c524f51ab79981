"""A prepared video as several inputs of vLLM: each with patches, rows, a name and tokens of its own."""

import warnings
from typing import Any

import pytest
import torch

from tests.support.item_records import item_record
from triptych_encoder.encoding import PreparedItem
from triptych_vllm_connector.pieces import piece_hashes

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalKwargsItem,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    from triptych_encoder.engine.encode_engine import VideoPieces
    from triptych_vllm_connector.records.positions import PositionCheck

HASH = "a" * 64
STEPS, CELLS, ROWS_OF_STEP = 5, 8, 2  # a row of four patches
TEXT, TIME, START, ROW, END = 1, 2, 3, 4, 5
STEP = [TIME, START, ROW, ROW, END]  # of the prompt, as Qwen3-VL has them
WIDTH = 4


def prepared(*, tagged: bool) -> PreparedItem:
    """`tagged`: tokens of text stand between the steps."""
    item = MultiModalKwargsItem(
        {
            "pixel_values_videos": MultiModalFieldElem(
                data=torch.arange(STEPS * CELLS * 3.0).reshape(-1, 3),
                field=MultiModalFlatField(slices=[slice(None)]),
            ),
            "video_grid_thw": MultiModalFieldElem(
                data=torch.tensor([STEPS, 2, 4]), field=MultiModalBatchedField(keep_on_cpu=True)
            ),
        }
    )
    tokens = STEP * STEPS if tagged else [ROW] * STEPS * ROWS_OF_STEP
    mask = torch.tensor([token == ROW for token in tokens]) if tagged else None
    engine_input: dict[str, Any] = {
        "type": "multimodal",
        "prompt_token_ids": [TEXT, TEXT, *tokens, TEXT],
        "mm_kwargs": MultiModalKwargsItems({"video": [item]}),
        "mm_hashes": {"video": [HASH]},
        "mm_placeholders": {"video": [PlaceholderRange(offset=2, length=len(tokens), is_embed=mask)]},
    }
    num_rows = STEPS * ROWS_OF_STEP
    return PreparedItem(engine_input, num_rows, len(tokens) + 3, WIDTH, item_record(num_rows))


@pytest.fixture
def pieces() -> VideoPieces:
    return VideoPieces(PositionCheck(None))


@pytest.mark.parametrize("tagged", [False, True])
def test_a_long_video_is_divided_at_its_steps(pieces: VideoPieces, tagged: bool) -> None:
    whole = prepared(tagged=tagged)
    divided = pieces.divide(whole, piece_rows=4)
    assert divided.record.pieces == (6, 4), "as equal as whole steps allow"
    assert divided.engine_input is whole.engine_input
    assert [each.num_embeds for each in divided.pieces] == [6, 4]
    names, steps = piece_hashes(HASH, (6, 4)), [(0, 3), (3, 5)]
    patches = whole.engine_input["mm_kwargs"]["video"][0]["pixel_values_videos"].data
    for piece, name, (first, end) in zip(divided.pieces, names, steps, strict=True):
        given = piece.engine_input
        (item,), (position,) = given["mm_kwargs"]["video"], given["mm_placeholders"]["video"]
        assert given["mm_hashes"] == {"video": [name]}
        assert item["video_grid_thw"].data.tolist() == [end - first, 2, 4]
        assert torch.equal(item["pixel_values_videos"].data, patches[first * CELLS : end * CELLS])
        assert position.offset == 2
        assert position.get_num_embeds() == piece.num_embeds
        tokens = given["prompt_token_ids"]
        assert len(tokens) == piece.num_tokens
        placed = tokens[position.offset : position.offset + position.length]
        assert [*tokens[:2], *tokens[2 + position.length :]] == [TEXT] * 3
        rows = [token == ROW for token in placed]
        assert rows == ([True] * len(placed) if position.is_embed is None else position.is_embed.tolist())
        if tagged:
            assert placed.count(START) >= end - first, "each step's own tokens stand in front of it"
            assert placed.index(START) < placed.index(ROW)


@pytest.mark.parametrize("piece_rows", [6, 1000])
def test_a_short_video_stays_whole(pieces: VideoPieces, piece_rows: int) -> None:
    whole = prepared(tagged=True)
    assert pieces.divide(whole, piece_rows) is whole
    assert whole.record.pieces == ()


def test_a_video_whose_rows_do_not_fit_its_steps_stays_whole(pieces: VideoPieces) -> None:
    whole = prepared(tagged=False)
    (item,) = whole.engine_input["mm_kwargs"]["video"]
    item["video_grid_thw"] = MultiModalFieldElem(
        data=torch.tensor([STEPS - 1, 2, 5]), field=MultiModalBatchedField(keep_on_cpu=True)
    )  # as many patches, and rows of pruned steps
    assert pieces.divide(whole, 4) is whole


def test_a_video_whose_pieces_cannot_be_placed_stays_whole() -> None:
    class Refusing(PositionCheck):
        def check(self, *item: Any) -> None:
            raise ValueError("the item's fields do not fit its tokens")

    whole = prepared(tagged=True)
    assert VideoPieces(Refusing(None)).divide(whole, 4) is whole
