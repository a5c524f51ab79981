"""Let CUDA builds of torchvision and torchaudio stand aside on a machine without CUDA.

Where only those builds can be had, importing transformers fails although none
of their compiled code is used here. Call `prepare_imports` before the first
import of transformers; it does nothing where the imports work.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

import torch


def prepare_imports() -> None:
    """Define the two schemas torchvision's import asks for; hide a broken torchaudio."""
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # defined already
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
    with contextlib.suppress(ModuleNotFoundError):
        try:
            importlib.import_module("torchaudio")
        except OSError:
            # None is Python's mark for "not there": transformers then goes without it.
            sys.modules["torchaudio"] = None  # type: ignore[assignment]
