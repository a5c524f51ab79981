"""Pieces of an item: several features in the prompt in the place of one, each with a tensor of its own.

prefill_decode's host divides a feature (`divide_feature`), so vLLM schedules, loads and frees each piece as
an item. Where the item as a whole is asked about, in replies to its encoder and in the model's positions, its
pieces are found again (`group_pieces`): they have the item's `mm_hash`, and an `identifier` of their own.
Features are vLLM's `MultiModalFeatureSpec`s, positions its `PlaceholderRange`s. Imports nothing of vLLM.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from triptych_common.domain.hashing import entry_hashes
from triptych_common.domain.hashing import row_ranges as row_ranges
from triptych_common.protocol.ids import MmHash

_POSITION_METHODS = ("get_mrope_input_positions", "get_xdrope_input_positions")


def piece_hashes(mm_hash: str, pieces: Sequence[int]) -> list[MmHash]:
    """Hashes under which the store holds the pieces of an item."""
    return list(entry_hashes(MmHash(mm_hash), pieces)) if pieces else []


def divide_position(position: Any, pieces: Sequence[int]) -> list[Any]:
    """Divide all of the item's tokens into consecutive pieces.

    A piece begins with its first row's token, so text tokens between two pieces belong to the former.
    """
    if position.is_embed is None:
        tokens_of_rows = list(range(position.length))
    else:
        tokens_of_rows = position.is_embed.nonzero().flatten().tolist()
    starts = [0, *(tokens_of_rows[first] for first, _ in row_ranges(pieces)[1:]), position.length]
    return [
        replace(
            position,
            offset=position.offset + start,
            length=end - start,
            is_embed=None if position.is_embed is None else position.is_embed[start:end],
        )
        for start, end in pairwise(starts)
    ]


def divide_feature(feature: Any, pieces: Sequence[int]) -> list[Any]:
    """One feature for each piece, all with the item's data; the feature itself if it has no pieces.

    Raises:
        ValueError: the pieces are not of this feature.
    """
    if not pieces:
        return [feature]
    if sum(pieces) != feature.mm_position.get_num_embeds():
        raise ValueError("the pieces have other rows than the item")
    positions = divide_position(feature.mm_position, pieces)
    return [
        replace(feature, identifier=str(identifier), mm_position=position)
        for identifier, position in zip(piece_hashes(feature.identifier, pieces), positions, strict=True)
    ]


def item_of(feature: Any) -> str:
    return feature.mm_hash or feature.identifier


def group_pieces(features: Sequence[Any]) -> list[list[Any]]:
    """Features of each item, in prompt order, which `features` are in."""
    groups: list[list[Any]] = []
    for feature in features:
        group = groups[-1] if groups else []
        is_piece = item_of(feature) != feature.identifier
        # The same item twice, one behind the other, has the same identifiers again.
        if is_piece and group and item_of(group[0]) == item_of(feature) and _is_new_in(group, feature):
            group.append(feature)
        else:
            groups.append([feature])
    return groups


def _is_new_in(group: Sequence[Any], feature: Any) -> bool:
    return all(each.identifier != feature.identifier for each in group)


def join_pieces(features: Sequence[Any]) -> list[Any]:
    """Features as they were before any was divided.

    vLLM strips data of features that the prefix cache covers: the last piece has the most of them.
    """
    return [group[0] if len(group) == 1 else _joined(group) for group in group_pieces(features)]


def _joined(group: Sequence[Any]) -> Any:
    first, last = group[0], group[-1]
    masks = [each.mm_position.is_embed for each in group]
    position = replace(
        first.mm_position,
        length=last.mm_position.offset + last.mm_position.length - first.mm_position.offset,
        is_embed=None if masks[0] is None else _concatenated(masks),
    )
    return replace(last, identifier=item_of(first), mm_position=position)


def _concatenated(masks: Sequence[Any]) -> Any:
    import torch

    return torch.cat(list(masks))


# ---- positions ------------------------------------------------------------------------------------
def place_items_whole(model: Any) -> None:
    """Make `model` compute positions from whole items where vLLM passes pieces, in prefill_decode's worker.

    A model with positions in several dimensions (M-RoPE and the like) computes them from an item's fields,
    above all the grid. A piece has its item's fields, so positions are those of an engine without pieces.
    """
    for name in _POSITION_METHODS:
        compute = getattr(model, name, None)
        if compute is not None:
            setattr(model, name, _with_whole_items(compute))


def _with_whole_items(compute: Any) -> Any:
    def positions(input_tokens: list[int], mm_features: list[Any]) -> Any:
        return compute(input_tokens, join_pieces(mm_features))

    return positions
