"""What images of our own teach about the form of items, for a model whose name is not known."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from triptych_encoder.preprocessing.item_schema import ItemMismatchError, ItemSchema, Sample, parts_of


@dataclass
class Element:
    """vLLM's `MultiModalFieldElem`."""

    data: Any


def item(
    grid: tuple[int, int, int], width: int = 12, dtype: torch.dtype = torch.float32
) -> dict[str, Element]:
    """As Qwen's: patches in rows, and their grid; four patches make one row of the tower's output."""
    rows = grid[0] * grid[1] * grid[2]
    return {
        "pixel_values": Element(torch.zeros(rows, width, dtype=dtype)),
        "image_grid_thw": Element(torch.tensor(grid)),
    }


def num_embeds(grid: tuple[int, int, int]) -> int:
    return grid[0] * grid[1] * grid[2] // 4


GRIDS = [(1, 2, 2), (1, 4, 6), (1, 8, 8)]
PATCHES = ItemSchema([Sample(parts_of(item(grid)), num_embeds(grid)) for grid in GRIDS])


@pytest.mark.parametrize("grid", [*GRIDS, (1, 2, 20), (1, 30, 30)])
def test_any_size_of_the_same_form_fits(grid: tuple[int, int, int]) -> None:
    PATCHES.check(item(grid), num_embeds(grid))


@pytest.mark.parametrize(
    ("made", "rows"),
    [
        (item((1, 4, 4), width=3), 4),
        (item((1, 4, 4), dtype=torch.float64), 4),
        (item((1, 4, 4)), 16),
        (item((1, 4, 4)), 0),
        ({**item((1, 4, 4)), "image_grid_thw": Element(torch.tensor([1, 4, 5]))}, 4),
        ({**item((1, 4, 4)), "image_grid_thw": Element(torch.tensor([1, -4, -4]))}, 4),
        ({**item((1, 4, 4)), "image_grid_thw": Element(torch.tensor([[1, 4, 4]]))}, 4),
        ({**item((1, 4, 4)), "image_grid_thw": Element([1, 4, 4])}, 4),
        ({**item((1, 4, 4)), "pixel_values": Element(torch.zeros(16, 2, 6))}, 4),
        ({**item((1, 4, 4)), "more": Element(torch.zeros(1))}, 4),
        ({"pixel_values": item((1, 4, 4))["pixel_values"]}, 4),
    ],
    ids=[
        "narrow", "other dtype", "other rows", "no rows", "grid of other rows", "negative grid",
        "other dimensions", "a list", "more dimensions", "another field", "a field less",
    ],
)  # fmt: skip
def test_another_form_does_not(made: dict[str, Element], rows: int) -> None:
    with pytest.raises(ItemMismatchError):
        PATCHES.check(made, rows)


def tiles(count: int, side: int = 4) -> dict[str, Element]:
    """As LLaVA-OneVision's: tiles of one size, and the image's own size, which stands for nothing here."""
    return {
        "pixel_values": Element([torch.zeros(3, side, side) for _ in range(count)]),
        "image_sizes": Element(torch.tensor([37 * count, 100 - count])),
    }


def test_lists_and_numbers_of_no_relation() -> None:
    schema = ItemSchema([Sample(parts_of(tiles(count)), rows) for count, rows in ((1, 5), (3, 11), (4, 18))])
    schema.check(tiles(7), 40)
    with pytest.raises(ItemMismatchError):
        schema.check(tiles(7, side=5), 40)


def test_a_form_that_never_changes() -> None:
    made = {"pixel_values": Element(torch.zeros(3, 4, 4))}
    schema = ItemSchema([Sample(parts_of(made), 16)] * 3)
    schema.check(made, 16)
    with pytest.raises(ItemMismatchError):
        schema.check({"pixel_values": Element(torch.zeros(3, 4, 5))}, 16)
