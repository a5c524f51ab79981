"""Divides a video into the time steps of its tower's grid, so that steps can be encoded separately.

Towers that were made for images attend within one step of time (two frames in Qwen2-VL and its kin), so the
rows of a step do not depend on other steps; `worker.step_check` finds out which towers do. The form is a grid
(time, height, width), patches in its order, equally many rows for each step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)

from triptych_common.protocol.item_record import MAX_PIECES

GRID_VALUES = 3  # time, height, width
GRID_SUFFIX = "_grid_thw"


class NotInStepsError(Exception):
    """The item is no video, or its fields do not show which values belong to which step."""


def num_steps(item: MultiModalKwargsItem) -> int:
    """Number of time steps in the item's grid. Raises NotInStepsError: it cannot be divided."""
    num, _ = _form(item)
    return num


def cut_steps(item: MultiModalKwargsItem, first: int, end: int) -> MultiModalKwargsItem:
    """Item with only its steps from `first` up to `end`. Raises NotInStepsError: it cannot be divided."""
    num, cells_of_step = _form(item)
    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(
                data=_cut(name, element.data, element.field, (first, end, num), cells_of_step),
                field=element.field,
            )
            for name, element in item.items()
        }
    )


def repeat_step(item: MultiModalKwargsItem, times: int) -> MultiModalKwargsItem:
    """Video of `times` steps, each equal to the item's first one.

    Raises:
        NotInStepsError: it cannot be divided.
    """
    step = cut_steps(item, 0, 1)
    _, cells_of_step = _form(step)

    def repeated(name: str, data: Any, field: BaseMultiModalField) -> Any:
        if name.endswith(GRID_SUFFIX):
            grid = data.clone()
            grid.view(-1)[0] = times
            return grid
        if _is_patches(data, field, cells_of_step):
            return torch.cat([data] * times)
        return data * times if isinstance(data, (list, tuple)) else data

    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(data=repeated(name, each.data, each.field), field=each.field)
            for name, each in step.items()
        }
    )


def steps_of_pieces(num_steps: int, rows_of_step: int, piece_rows: int) -> list[int]:
    """Number of steps of each piece, in order; one piece if there are too few rows for two.

    A piece has at least `piece_rows` rows, and there are at most `MAX_PIECES` pieces. The result follows from
    the three numbers alone, so that every encoder divides an item in the same way. A change requires a new
    `RECORD_VERSION`, or earlier records would name pieces that are no longer made.
    """
    fewest = max(-(-piece_rows // rows_of_step), -(-num_steps // MAX_PIECES), 1)
    num_pieces = max(num_steps // fewest, 1)
    each, longer = divmod(num_steps, num_pieces)
    return [each + (number < longer) for number in range(num_pieces)]


def _form(item: MultiModalKwargsItem) -> tuple[int, int]:
    grids = [element.data for name, element in item.items() if name.endswith(GRID_SUFFIX)]
    if len(grids) != 1 or not isinstance(grids[0], torch.Tensor) or grids[0].numel() != GRID_VALUES:
        raise NotInStepsError("no grid of its own")
    num, height, width = (int(value) for value in grids[0].flatten().tolist())
    if num < 1 or not any(_is_patches(each.data, each.field, num * height * width) for each in item.values()):
        raise NotInStepsError("no patches in the order of the grid")
    return num, height * width


def _is_patches(data: Any, field: BaseMultiModalField, num_cells: int) -> bool:
    return (
        isinstance(field, MultiModalFlatField)
        and getattr(field, "dim", 0) == 0
        and isinstance(data, torch.Tensor)
        and data.shape[0] == num_cells
    )


def _is_off(data: Any) -> bool:
    """True if the value is a single switch, which is off."""
    return isinstance(data, torch.Tensor) and data.numel() == 1 and not bool(data)


def _cut(
    name: str, data: Any, field: BaseMultiModalField, steps: tuple[int, int, int], cells_of_step: int
) -> Any:
    """Cut a field; raises NotInStepsError if it is unknown which values belong to a step."""
    first, end, num = steps
    if name.endswith(GRID_SUFFIX):
        grid = data.clone()
        grid.view(-1)[0] = end - first
        return grid
    if _is_patches(data, field, num * cells_of_step):
        return data[first * cells_of_step : end * cells_of_step]
    if isinstance(field, MultiModalSharedField):
        if _is_off(data):
            return data
        raise NotInStepsError(f"{name} is on")  # e.g. its audio stands between its frames
    if not isinstance(field, MultiModalBatchedField):
        raise NotInStepsError(f"the field {name} is neither patches nor the item's own")
    if isinstance(data, Sequence) and not isinstance(data, str):
        if len(data) != num:
            raise NotInStepsError(f"the field {name} has not one value for each step")
        return data[first:end]
    if isinstance(data, torch.Tensor) and data.numel() > 1:
        if data.ndim != 1 or data.shape[0] != num:
            raise NotInStepsError(f"the field {name} has not one value for each step")
        return data[first:end]
    return data  # one value: of the whole video, e.g. the seconds that a step lasts
