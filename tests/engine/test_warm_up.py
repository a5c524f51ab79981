"""After an instance has registered, no request pays for what is set up once: for each role that generates."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.real.joining import records_of
from tests.support.real.system import EXACT, MODEL, System, running_system

pytestmark = pytest.mark.engine

PROMPT = "read the digits 1 2 3"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 1},
    "seed": {"temperature": 1, "seed": 7},
    "top_k": {"temperature": 1, "top_k": 3},
    "top_p": {"temperature": 1, "top_p": 0.7},
    "min_p": {"temperature": 1, "min_p": 0.2},
    "n": {"temperature": 1, "n": 3},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {"3": 2.0}},
    "bad_words": {"bad_words": ["one"]},
    "allowed_token_ids": {"allowed_token_ids": [3, 4]},
    "min_tokens": {"min_tokens": 2},
    "logprobs": {"logprobs": 4},
    "logprobs of several": {"logprobs": 2, "n": 3, "temperature": 1},
    "prompt_logprobs": {"prompt_logprobs": 3},
    "json": {"response_format": {"type": "json_object"}},
    "regex": {"structured_outputs": {"regex": "[0-9]{2}"}},
}
COMPILED = (".so", ".cpp", ".cubin", ".ptx")


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    """An instance of each role that can answer a text, and no encoder."""
    options = f"--prefill-decode-args={' '.join(EXACT)}"
    counts = (
        "--encoders=0",
        "--prefill-decodes=0",
        "--prefills=1",
        "--decodes=1",
        "--encode-prefill-decodes=1",
    )
    with running_system(options, *counts, is_forked=True) as running:
        yield running


def compiled_files(system: System) -> list[Path]:
    """What compilers have written, wherever the system keeps files."""
    files = [each for folder in (system.run_dir, system.state_dir) for each in folder.rglob("*")]
    return [each for each in files if each.suffix in COMPILED]


def loaded_libraries(process: psutil.Process) -> set[str]:
    """Native code in the memory of a service and its engine."""
    found: set[str] = set()
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper that has ended meanwhile
            found |= {entry.path for entry in each.memory_maps() if ".so" in entry.path}
    return found


@pytest.mark.parametrize("role", ["prefill", "decode", "encode-prefill-decode"])
def test_no_way_of_sampling_compiles_or_loads_anything_after_ready(system: System, role: str) -> None:
    (instance,) = [each for each in records_of(system).values() if each.role.value == role]
    process = psutil.Process(system.service_pid(instance.instance))
    before = loaded_libraries(process)
    assert before
    for way, fields in WAYS.items():
        body = {"model": MODEL.name, "prompt": PROMPT, "max_tokens": 4, **fields}
        answer = httpx.post(f"{instance.url}/v1/completions", json=body, trust_env=False, timeout=120)
        assert answer.status_code == 200, (way, answer.text)
        assert loaded_libraries(process) == before, way
        assert not compiled_files(system), way
