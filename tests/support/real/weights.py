"""The demo model with other weights: another version of it, whose answers and tensors are others."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.real.system import MODEL

FILE = "model.safetensors"
TOWER = "visual."
NOISE = 0.8  # of each tensor's own spread


def other_weights(folder: Path, *, tower: bool = True, text: bool = True) -> Path:
    """A model folder in `folder`, of the same name. The same weights each time.

    Args:
        tower: the vision tower's are others.
        text: the language model's are.
    """
    made = folder / MODEL.name
    shutil.copytree(MODEL, made, ignore=shutil.ignore_patterns("samples", "*.npz", "*.py", FILE))
    generator = torch.Generator().manual_seed(32)
    weights = load_file(MODEL / FILE)
    for name, tensor in sorted(weights.items()):
        noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * NOISE
        if tensor.dim() > 1 and (tower if name.startswith(TOWER) else text):
            weights[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(weights, made / FILE, {"format": "pt"})
    return made
