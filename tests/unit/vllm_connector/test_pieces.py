"""Items in pieces: divided, found again, and joined to what they were."""

import warnings
from itertools import pairwise

import pytest
import torch

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    from triptych_vllm_connector.pieces import (
        divide_feature,
        divide_position,
        group_pieces,
        item_of,
        join_pieces,
        piece_hashes,
        row_ranges,
    )

A, B = "a" * 64, "b" * 64
MASK = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0], dtype=torch.bool)  # tags around three frames


def video(mm_hash: str, offset: int, length: int, mask: torch.Tensor | None = None) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="video",
        identifier=mm_hash,
        mm_position=PlaceholderRange(offset=offset, length=length, is_embed=mask),
        mm_hash=mm_hash,
    )


def test_rows_are_divided_in_order() -> None:
    assert row_ranges((2, 4, 1)) == [(0, 2), (2, 6), (6, 7)]
    assert row_ranges(()) == []


def test_pieces_have_names_of_their_own() -> None:
    names = [*piece_hashes(A, (2, 4)), *piece_hashes(A, (3, 3)), *piece_hashes(B, (2, 4)), A, B]
    assert len(set(names)) == len(names)
    assert piece_hashes(A, (2, 4)) == piece_hashes(A, (2, 4))


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("pieces", [(2, 4), (2, 2, 2), (4, 2)])
def test_the_tokens_of_an_item_are_all_in_its_pieces(
    mask: torch.Tensor | None, pieces: tuple[int, ...]
) -> None:
    length = 6 if mask is None else len(mask)
    positions = divide_position(PlaceholderRange(offset=10, length=length, is_embed=mask), pieces)
    assert [each.get_num_embeds() for each in positions] == list(pieces)
    assert positions[0].offset == 10
    assert positions[-1].offset + positions[-1].length == 10 + length
    assert all(one.offset + one.length == other.offset for one, other in pairwise(positions))
    if mask is not None:
        assert torch.equal(torch.cat([each.is_embed for each in positions]), mask)
        assert all(each.is_embed[0] for each in positions[1:]), (
            "text between two pieces belongs to the former"
        )


def test_an_item_without_pieces_stays() -> None:
    whole = video(A, 0, 6)
    assert divide_feature(whole, ()) == [whole]
    assert join_pieces([whole]) == [whole]


def test_pieces_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="other rows"):
        divide_feature(video(A, 0, 6), (3, 2))


@pytest.mark.parametrize("mask", [None, MASK])
def test_pieces_are_joined_to_what_they_were(mask: torch.Tensor | None) -> None:
    """The same item twice, one behind the other, and others around it."""
    length = 6 if mask is None else len(mask)
    twice = [video(A, offset, length, mask) for offset in (4, 4 + length)]
    items = [video(B, 0, 4), *twice, video(B, 50, 4)]
    divided = [part for each in items for part in divide_feature(each, (2, 2, 2) if each in twice else ())]
    assert [len(group) for group in group_pieces(divided)] == [1, 3, 3, 1]
    assert [item_of(each) for each in divided] == [B, *[A] * 6, B]
    assert join_pieces(divided) == items


def test_an_item_that_comes_twice_whole_is_two_items() -> None:
    items = [video(A, 0, 6), video(A, 6, 6)]
    assert [len(group) for group in group_pieces(items)] == [1, 1]
    assert join_pieces(items) == items
