"""A model of text alone, with random weights: it tells classes. Its tokenizer is the demo model's."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.support.real.system import MODEL

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, VOCABULARY, CLASSES = 128, 256, 2, 4, 2, 1024, 3
HEAD_SIZE = WIDTH // HEADS  # vLLM reads no other for Qwen2, and the CPU takes none below 32


def make_classifier(folder: Path) -> Path:
    """As `transformers` saves a `Qwen2ForSequenceClassification`."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, folder / name)
    random = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "score.weight": (CLASSES, WIDTH),
    }
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes().items()}
    shapes["model.norm.weight"] = (WIDTH,)
    tensors = {
        name: np.ones(shape, np.float32)
        if name.endswith("norm.weight")
        else (random.standard_normal(shape) * 0.2).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config()))
    return folder


def _layer_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
        "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_SIZE),
        "mlp.gate_proj.weight": (INNER, WIDTH),
        "mlp.up_proj.weight": (INNER, WIDTH),
        "mlp.down_proj.weight": (WIDTH, INNER),
    }
    for name, num_heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
        shapes[f"self_attn.{name}.weight"] = (num_heads * HEAD_SIZE, WIDTH)
        shapes[f"self_attn.{name}.bias"] = (num_heads * HEAD_SIZE,)
    return shapes


def _config() -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForSequenceClassification"],
        "model_type": "qwen2",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "num_labels": CLASSES,
        "id2label": {str(index): f"class {index}" for index in range(CLASSES)},
        "label2id": {f"class {index}": index for index in range(CLASSES)},
        "dtype": "float32",
    }
