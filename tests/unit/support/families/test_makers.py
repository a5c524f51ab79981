"""Every family's folder: its config is of a model that vLLM has, its processor loads and places media."""

import json
from pathlib import Path

import pytest

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
