"""Isolates faults: an item that raises inside the vision tower costs its own job, not the engine or others.

    step --raises--> each item alone --raises--> refused, the engine goes on
                         `--------------------> encoded

Checks before the engine (`triptych_encoder.preprocessing.item_schema`) keep such items away. This is for
what they miss.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

Planned = Mapping[str, list[int]]  # engine request id -> numbers of its items, as in vLLM's scheduler output


def divided(planned: Planned, is_image: Callable[[str, int], bool]) -> list[dict[str, list[int]]]:
    """Divide a step's items into those that are encoded together: all images, and each other item alone.

    vLLM's towers of Qwen3-Omni encode an audio clip otherwise beside a longer one, and those of
    LLaVA-OneVision raise where videos with different numbers of frames meet.

    Args:
        is_image: called for each item (engine request id, number).
    """
    images: dict[str, list[int]] = {}
    others = []
    for engine_request_id, indices in planned.items():
        for index in indices:
            if is_image(engine_request_id, index):
                images.setdefault(engine_request_id, []).append(index)
            else:
                others.append({engine_request_id: [index]})
    return [images, *others] if images else others


def encode_contained(
    encode: Callable[[dict[str, list[int]]], Any],
    planned: Planned,
    refuse: Callable[[str, int, Exception], None],
    num_ranks: int,
) -> None:
    """Run `encode` for all of `planned`; when that raises, for each item alone.

    Args:
        refuse: called for each item (engine request id, number) that raises alone.
        num_ranks: workers that run the same step.

    Raises:
        Exception: one after which nothing on this device can be trusted.
    """
    try:
        encode(dict(planned))
        return
    except Exception as error:
        if _is_fatal(error, num_ranks):
            raise
        failure = error
    items = [
        (engine_request_id, index) for engine_request_id, indices in planned.items() for index in indices
    ]
    log.warning("encoder step failed", num_items=len(items), error=repr(failure)[:500])
    for engine_request_id, index in items:
        try:
            if len(items) == 1:
                raise failure
            encode({engine_request_id: [index]})
        except Exception as error:
            if _is_fatal(error, num_ranks):
                raise
            refuse(engine_request_id, index, error)
    check_device()


def check_device() -> None:
    """Check the device after an error of unknown cause; a device error ends the engine.

    Raises:
        torch.AcceleratorError: nothing on this device can be trusted any more.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _is_fatal(error: Exception, num_ranks: int) -> bool:
    """True if the state of the device is lost, or of other ranks that may not have raised."""
    return isinstance(error, torch.AcceleratorError) or (
        num_ranks > 1 and isinstance(error, (torch.OutOfMemoryError, torch.distributed.DistError))
    )
