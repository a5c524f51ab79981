"""Every family's folder: its config is of a model that vLLM has, its processor loads and places media."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.families.family import MediaKind
from tests.support.families.registry import ALL_FAMILIES, FAMILIES

MAX_PARAMETERS = 5_000_000


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("families") / request.param
    ALL_FAMILIES[request.param].make(made)
    return made


each_family = pytest.mark.parametrize("folder", FAMILIES, indirect=True)


@each_family
def test_weights_are_few_and_spread(folder: Path) -> None:
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) < MAX_PARAMETERS
    (output,) = (weights[name] for name in weights if name.endswith(output_name(folder)))
    spread = float(output.std()) * output.shape[1] ** 0.5
    assert spread == pytest.approx(2.0, rel=0.05)


def output_name(folder: Path) -> str:
    """Of the weights that make the logits."""
    config = json.loads((folder / "config.json").read_text())
    return "embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"


@each_family
def test_a_prompt_has_a_placeholder_for_each_medium(folder: Path) -> None:
    from transformers import AutoConfig, AutoProcessor

    AutoConfig.from_pretrained(folder)
    processor: Any = AutoProcessor.from_pretrained(folder)
    kinds = [kind for kind, limit in FAMILIES[folder.name].limits.items() for _ in range(limit)]
    content = [part for kind in kinds for part in ({"type": str(kind)}, {"type": "text", "text": "and"})]
    messages = [{"role": "user", "content": content}]
    prompt = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt.startswith("<|im_start|>user\n")
    assert prompt.endswith("and<|im_end|>\n<|im_start|>assistant\n"), prompt
    ids = processor.tokenizer(prompt)["input_ids"]
    for kind in MediaKind:
        if kind in FAMILIES[folder.name].limits:
            found = max(ids.count(number) for number in placeholder_ids(folder, kind))
            assert found == FAMILIES[folder.name].limits[kind], prompt


def placeholder_ids(folder: Path, kind: MediaKind) -> list[int]:
    """Ids by which the config names a kind, whatever it calls them."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("thinker_config", config)
    names = [f"{kind}_token_id", f"{kind}_token_index", "boi_token_index"]
    return [config[name] for name in names if config.get(name) is not None]
