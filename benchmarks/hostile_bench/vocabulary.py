"""The demo model with the vocabulary of a large one: what a request costs with 150,000 tokens.

Its answers are those of a small model; grammars, masks, sampling and log probabilities have all tokens.
"""

import base64
import importlib.resources
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.convert_slow_tokenizer import bytes_to_unicode

EMBEDDINGS = "model.embed_tokens.weight"


def enlarge_vocabulary(model: Path, folder: Path) -> Path:
    """Write `model` to `folder`, with the tokens beside its own that mistral_common has in its package."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.py", "samples", "*.npz"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    config = json.loads((folder / "config.json").read_text())
    number = config["text_config"]["vocab_size"]
    letters = bytes_to_unicode()  # as byte-level BPE writes bytes in texts
    file = importlib.resources.files("mistral_common") / "data" / "tekken_240911.json"
    for each in json.loads(file.read_text())["vocab"]:
        text = "".join(letters[byte] for byte in base64.b64decode(each["token_bytes"]))
        if text not in vocabulary:
            vocabulary[text] = number
            number += 1
    config["text_config"]["vocab_size"] = number
    weights = load_file(folder / "model.safetensors")
    embeddings = weights[EMBEDDINGS]
    wider = torch.zeros((number, embeddings.shape[1]), dtype=embeddings.dtype)
    wider[: len(embeddings)] = embeddings
    save_file({**weights, EMBEDDINGS: wider}, folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
