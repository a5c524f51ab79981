"""LoRA adapters for tests: random weights for the demo model, large enough to change its answers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

RANK = 4
MODULES = ("q_proj", "v_proj", "down_proj")


@dataclass(frozen=True)
class Adapters:
    """Folders of LoRA adapters: one that engines load at their start, and one for later."""

    french: Path
    dutch: Path

    def options(self) -> Sequence[str]:
        return ("--lora-modules", f"french={self.french}")


def make_adapter(folder: Path, model: Path, seed: int) -> Path:
    """A folder as PEFT saves it."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    with safe_open(model / "model.safetensors", "np") as weights:
        for name in sorted(weights.keys()):
            layer = name.removesuffix(".weight")
            if not name.startswith("model.layers.") or layer.rpartition(".")[2] not in MODULES:
                continue
            num_rows, num_columns = weights.get_slice(name).get_shape()
            prefix = f"base_model.model.{layer}"
            tensors[f"{prefix}.lora_A.weight"] = _weights(random, RANK, num_columns)
            tensors[f"{prefix}.lora_B.weight"] = _weights(random, num_rows, RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(MODULES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _weights(random: np.random.Generator, num_rows: int, num_columns: int) -> np.ndarray:
    return (random.standard_normal((num_rows, num_columns)) * 0.15).astype(np.float32)
