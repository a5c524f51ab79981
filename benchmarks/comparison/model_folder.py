"""Writes the model of a scale: the demo model's tokenizer and processor, random weights of a fixed seed.

    python -m comparison.model_folder SCALE SOURCE FOLDER

A process of its own: it needs torch and transformers, and gives their memory back.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from comparison.model_shapes import SCALES, Scale

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path.append(str(BENCHMARKS.parent))  # for tests.support

from tests.support.model_folders import made_once  # noqa: E402

SEED = 12
COPIED = (
    "tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
WRITE_TIMEOUT_S = 600


def model_folder(scale: Scale, source: Path, cache: Path) -> Path:
    """The folder for `scale` below `cache`, written if it is not there. `source`: the demo model.

    Raises:
        subprocess.CalledProcessError: it could not be written.
    """

    def write_apart(folder: Path) -> None:
        command = [sys.executable, "-m", "comparison.model_folder", scale.name, str(source), str(folder)]
        subprocess.run(command, check=True, timeout=WRITE_TIMEOUT_S, stdout=sys.stderr, cwd=BENCHMARKS)

    return made_once(cache / f"qwen2.5-vl-{scale.name}-{_digest(scale, source)}", write_apart)


def _digest(scale: Scale, source: Path) -> str:
    parts = [json.dumps(asdict(scale), sort_keys=True), str(SEED)]
    parts += [(source / name).read_text() for name in (*COPIED, "config.json")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def model_config(scale: Scale, demo: dict[str, Any]) -> dict[str, Any]:
    """config.json for a scale. `demo`: that of the demo model, for tokens."""
    head = scale.text.hidden // scale.text.heads
    quarter = head // 8  # of half a head: sections for time, height and width, as 2 : 3 : 3
    sections = [2 * quarter, 3 * (head // 16), 3 * (head // 16)]
    sections[0] = head // 2 - sections[1] - sections[2]
    tokens = {key: demo[key] for key in demo if key.endswith("_token_id")}
    ends = {key: demo["text_config"][key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "text_config": {
            "hidden_size": scale.text.hidden,
            "intermediate_size": scale.text.intermediate,
            "num_hidden_layers": scale.text.layers,
            "num_attention_heads": scale.text.heads,
            "num_key_value_heads": scale.text.kv_heads,
            "vocab_size": scale.vocabulary,
            "max_position_embeddings": scale.max_positions,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
            "tie_word_embeddings": True,
            **ends,
        },
        "vision_config": {
            "depth": scale.tower.depth,
            "hidden_size": scale.tower.hidden,
            "intermediate_size": scale.tower.intermediate,
            "num_heads": scale.tower.heads,
            "out_hidden_size": scale.text.hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": list(scale.tower.full_attention),
        },
        "tie_word_embeddings": True,
        **tokens,
    }


def write(scale: Scale, source: Path, folder: Path) -> None:
    """Config, random weights in bfloat16, and the demo model's tokenizer and processor."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(**model_config(scale, json.loads((source / "config.json").read_text())))
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.bfloat16)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    for name in COPIED:
        shutil.copyfile(source / name, folder / name)


if __name__ == "__main__":
    write(SCALES[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]))
