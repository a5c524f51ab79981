"""A second pair of engines: what needs options of vLLM's own, all of them in one engine."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.real.adapters import make_adapter
from tests.support.real.system import EXACT, MODEL, Server, System, running_monolith, running_system

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
MAX_STEP_TOKENS = 64  # so that most prompts with an image are computed in several steps
OPTIONS = (
    "--enable-lora",
    "--max-lora-rank=8",
    f"--speculative-config={json.dumps(DRAFTS)}",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--reasoning-parser=granite",
    "--scheduling-policy=priority",
    "--max-num-seqs=8",
    f"--max-num-batched-tokens={MAX_STEP_TOKENS}",
)


@dataclass(frozen=True)
class Adapters:
    """Folders of LoRA adapters: one that engines load at their start, and one for later."""

    french: Path
    dutch: Path

    def options(self) -> Sequence[str]:
        return ("--lora-modules", f"french={self.french}")


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    folder = tmp_path_factory.mktemp("adapters")
    return Adapters(make_adapter(folder / "french", MODEL, 1), make_adapter(folder / "dutch", MODEL, 2))


@pytest.fixture(scope="session")
def equipped(adapters: Adapters) -> Iterator[System]:
    with running_system(
        f"--encoder-args={shlex.join(EXACT)}",
        f"--prefill-decode-args={shlex.join([*EXACT, *OPTIONS, *adapters.options()])}",
        TRIPTYCH_OVERLAP_MIN_TOKENS="1",
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
    ) as running:
        yield running


@pytest.fixture(scope="session")
def equipped_monolith(adapters: Adapters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("equipped")
    with running_monolith(folder, *OPTIONS, *adapters.options()) as running:
        yield running
