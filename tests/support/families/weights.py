"""Random weights that are spread wide, and model folders with them.

With the weights that transformers starts from, all media look alike to a small model: its answers hang on
the text alone, and one with the wrong embeddings would pass. Here each product has `GAIN` times the size of
what goes in: attention picks few places, and what is there decides the next token.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GAIN = 2.0
SEED = 17
_WEIGHTS = "model.safetensors"


def save_model(
    folder: Path, model_class: Any, config: Any, processor: Any, prefixes: Mapping[str, str] | None = None
) -> None:
    """Config, float32 weights, tokenizer, processor and generation config.

    Args:
        model_class: one of transformers' that holds the whole model.
        prefixes: beginnings of weights' names, and what published checkpoints have in their place.
    """
    import torch

    torch.manual_seed(SEED)
    model = model_class(config)
    spread(model)
    model.to(torch.float32).save_pretrained(folder)
    rename_weights(folder / _WEIGHTS, prefixes or {})
    processor.save_pretrained(folder)
    tokenizer = processor.tokenizer
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(ends))


def spread(model: Any) -> None:
    """Draw every matrix anew; biases, norms and other vectors stay as they are."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                num_inputs = parameter.shape[-1] if ".experts." in name else parameter[0].numel()
                parameter.normal_(0, GAIN / math.sqrt(num_inputs))


def rename_weights(file: Path, prefixes: Mapping[str, str]) -> None:
    """Each name gets what belongs to the first prefix that it begins with; the others stay."""
    from safetensors.torch import load_file, save_file

    if prefixes:
        weights = {renamed(name, prefixes): tensor for name, tensor in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
