"""A step of the encoder that raises: which items are refused, which are encoded, and when the engine ends."""

from collections.abc import Callable

import pytest
import torch

from triptych_vllm_connector.worker.containment import divided, encode_contained

PLANNED = {"a": [0], "b": [0, 1], "c": [0]}


class Tower:
    """Raises `error` for the items named; remembers what it encoded."""

    def __init__(self, *guilty: tuple[str, int], error: Callable[[], Exception] = ValueError) -> None:
        self.guilty = set(guilty)
        self.error = error
        self.encoded: list[tuple[str, int]] = []
        self.num_steps = 0
        self.refused: list[tuple[str, int]] = []

    def encode(self, planned: dict[str, list[int]]) -> None:
        self.num_steps += 1
        items = [(name, index) for name, indices in planned.items() for index in indices]
        if self.guilty.intersection(items):
            raise self.error()
        self.encoded += items

    def refuse(self, request_id: str, index: int, error: Exception) -> None:
        self.refused.append((request_id, index))


def run(tower: Tower, planned: dict[str, list[int]], num_ranks: int = 1) -> None:
    encode_contained(tower.encode, planned, tower.refuse, num_ranks)


def test_a_step_without_fault_is_one_step() -> None:
    tower = Tower()
    run(tower, PLANNED)
    assert (tower.num_steps, len(tower.encoded), tower.refused) == (1, 4, [])


def test_the_guilty_are_refused_and_the_others_encoded() -> None:
    tower = Tower(("b", 1), ("c", 0))
    run(tower, PLANNED)
    assert tower.encoded == [("a", 0), ("b", 0)]
    assert tower.refused == [("b", 1), ("c", 0)]


def test_one_alone_is_not_tried_twice() -> None:
    tower = Tower(("a", 0))
    run(tower, {"a": [0]})
    assert (tower.num_steps, tower.refused) == (1, [("a", 0)])


@pytest.mark.parametrize("planned", [PLANNED, {"b": [1]}])
def test_after_an_error_of_the_device_the_engine_ends(planned: dict[str, list[int]]) -> None:
    tower = Tower(("b", 1), error=lambda: torch.AcceleratorError("CUDA error: device-side assert triggered"))
    with pytest.raises(torch.AcceleratorError):
        run(tower, planned)
    assert tower.refused == []


def test_memory_that_one_of_several_ranks_lacks_ends_the_engine() -> None:
    """The others have not raised, and wait for it."""
    tower = Tower(("b", 1), error=lambda: torch.OutOfMemoryError("CUDA out of memory"))
    run(tower, PLANNED)
    assert tower.refused == [("b", 1)]
    with pytest.raises(torch.OutOfMemoryError):
        run(tower, PLANNED, num_ranks=2)


def test_images_of_a_step_are_encoded_together_and_all_else_alone() -> None:
    modalities = {"a": ["image"], "b": ["audio", "image"], "c": ["video"], "d": ["image", "image"]}
    planned = {name: list(range(len(items))) for name, items in modalities.items()}
    assert divided(planned, lambda name, index: modalities[name][index] == "image") == [
        {"a": [0], "b": [1], "d": [0, 1]},
        {"b": [0]},
        {"c": [0]},
    ]
