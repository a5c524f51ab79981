"""What the check of a tower makes of its rows."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from triptych_vllm_connector.worker import step_check
    from triptych_vllm_connector.worker.step_check import StepCheck, check_steps, compared

WHOLE = torch.arange(12, dtype=torch.float32).reshape(6, 2)
FIRST_KEPT = torch.cat([WHOLE[:3], -WHOLE[3:]])
SECOND_KEPT = torch.cat([-WHOLE[:3], WHOLE[3:]])
REPEATED = torch.cat([WHOLE[:3], WHOLE[:3]])
PARTS = [WHOLE[:3], WHOLE[3:]]
BIT = 2**-20


def test_rows_that_stay_are_apart() -> None:
    check = compared(WHOLE, FIRST_KEPT, SECOND_KEPT, REPEATED, PARTS)
    assert (check.why, check.difference, check.scale) == ("", 0, 11)


def test_parts_by_themselves_may_be_rounded_otherwise() -> None:
    check = compared(WHOLE, FIRST_KEPT, SECOND_KEPT, REPEATED, [PARTS[0] + 1e-5, PARTS[1]])
    assert check.why == ""
    assert 0 < check.difference < 1e-4


@pytest.mark.parametrize("case", ["first", "second"])
def test_one_bit_from_another_step_is_too_much(case: str) -> None:
    changed = WHOLE.clone()
    changed[0 if case == "first" else -1] += BIT
    first, second = (changed, SECOND_KEPT) if case == "first" else (FIRST_KEPT, changed)
    assert compared(WHOLE, first, second, REPEATED, PARTS).why == "rows depend on other steps"


def test_a_part_that_is_encoded_otherwise_is_found() -> None:
    assert (
        compared(WHOLE, FIRST_KEPT, SECOND_KEPT, REPEATED, [PARTS[1], PARTS[0]]).why
        == "a part by itself is encoded otherwise"
    )
    nan = torch.full((3, 2), float("nan"))
    assert (
        compared(WHOLE, FIRST_KEPT, SECOND_KEPT, REPEATED, [PARTS[0], nan]).why
        == "a part by itself is encoded otherwise"
    )


def test_a_part_of_other_rows_is_found() -> None:
    assert (
        compared(WHOLE, FIRST_KEPT, SECOND_KEPT, REPEATED, [WHOLE[:3], WHOLE[2:]]).why
        == "a part has other rows than in the whole"
    )


def test_rows_that_are_others_at_another_time_are_found() -> None:
    repeated = torch.cat([WHOLE[:3], WHOLE[:3] + 1e-4])
    check = compared(WHOLE, FIRST_KEPT, SECOND_KEPT, repeated, PARTS)
    assert check.why == "rows depend on the time of their step"


@pytest.mark.parametrize(("first", "second"), [(WHOLE, SECOND_KEPT), (FIRST_KEPT, WHOLE)])
def test_a_check_that_sees_no_change_at_all_proves_nothing(first: torch.Tensor, second: torch.Tensor) -> None:
    assert compared(WHOLE, first, second, REPEATED, PARTS).why == "rows do not depend on their patches"


def budget_that_raises(*errors: Exception) -> Callable[..., Any]:
    """Stands in for `MultiModalBudget`: one error after the other, then a model without videos."""
    left = list(errors)

    class Budget:
        mm_max_toks_per_item = ()

        def __init__(self, *args: Any, **options: Any) -> None:
            if left:
                raise left.pop(0)

    return Budget


class Worker:
    model_runner = None
    vllm_config = None


@pytest.mark.parametrize(
    ("errors", "why"),
    [
        (
            [TypeError("no dummy")],
            "the tower does not take a part by itself, or no dummy video could be made",
        ),
        ([torch.OutOfMemoryError("CUDA out of memory")], "the model takes no videos"),
        ([MemoryError(), TypeError("no dummy")], "the tower does not take a part by itself, or no dummy"),
        ([MemoryError("1"), MemoryError("2")], "not known: the machine failed twice, MemoryError('2')"),
    ],
)
def test_a_check_that_raises_leaves_videos_whole(
    errors: list[Exception], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the machine lacks is tried once more: it says nothing about the tower."""
    monkeypatch.setattr(step_check, "MultiModalBudget", budget_that_raises(*errors))
    check = check_steps(Worker())
    assert isinstance(check, StepCheck)
    assert check.why.startswith(why)
