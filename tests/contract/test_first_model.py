"""Each `up` of docs/guide/first-model.md is taken and not refused, for models of the published shapes."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.contract.product_sources import ROOT
from tests.support.waiting import free_port
from triptych_cli.app import app
from triptych_cli.commands import lifecycle
from triptych_cli.options import SystemOptions
from triptych_cli.system import machine
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.preflight import preflight
from triptych_common.domain.engine_args import option_value

PAGE = (ROOT / "docs" / "guide" / "first-model.md").read_text().replace("\\\n", " ")
COMMAND = re.compile(r"^(?:VLLM_CPU_KVCACHE_SPACE=(\d+) )?\./triptych (up --model \S+/[^\n]+)$", re.MULTILINE)
COMMANDS = [
    (each[2], int(each[1] or 1) << 30 if each.start() > PAGE.index("\n## A CPU\n") else None)
    for each in COMMAND.finditer(PAGE)
]
"""Each row adds the bytes of the KV cache; None: it is as large as the GPU allows."""


def shape(
    architecture: str, tower: str, layers: int, kv_heads: int, hidden: int, length: int
) -> dict[str, Any]:
    """The parts of a published configuration that decide what fits."""
    return {
        "architectures": [architecture], f"{tower}_config": {}, "num_hidden_layers": layers, "head_dim": 128,
        "num_key_value_heads": kv_heads, "hidden_size": hidden, "max_position_embeddings": length,
    }  # fmt: skip


CONFIGS = {
    "Qwen/Qwen2.5-VL-3B-Instruct": shape(
        "Qwen2_5_VLForConditionalGeneration", "vision", 36, 2, 2048, 128_000
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": shape(
        "Qwen2_5_VLForConditionalGeneration", "vision", 28, 4, 3584, 128_000
    ),
    "llava-hf/llava-1.5-7b-hf": shape("LlavaForConditionalGeneration", "vision", 32, 32, 4096, 4096),
    "Qwen/Qwen2-Audio-7B-Instruct": shape("Qwen2AudioForConditionalGeneration", "audio", 32, 32, 4096, 8192),
}


def kv_bytes(config: dict[str, Any]) -> int:
    """Bytes of a token's key and value, in 16 bits."""
    return 4 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


def test_the_page_has_commands_for_each_model_and_its_kv_cache() -> None:
    for name in CONFIGS:
        assert sum(f"--model {name}" in command for command, _ in COMMANDS) >= 2, name
    shown = [int(each) << 10 for each in re.findall(r"(\d+) KiB \|", PAGE)]
    assert shown == [kv_bytes(each) for each in CONFIGS.values()]


@pytest.mark.parametrize(("command", "cache_bytes"), COMMANDS)
def test_a_command_of_the_page_starts(
    command: str, cache_bytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[SystemOptions] = []
    monkeypatch.setattr(lifecycle, "up", lambda options, join: taken.append(options))
    monkeypatch.setattr(machine, "visible_gpus", tuple)
    typer.main.get_command(app).main(shlex.split(command), standalone_mode=False)
    config = CONFIGS[taken[0].model]
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = SystemOptions(**{**vars(taken[0]), "model": str(tmp_path), "port": free_port()})
    resolved = machine.resolve(options, RunLayout(tmp_path, tmp_path), deployment="default")
    preflight(resolved)
    if cache_bytes is not None:
        given = option_value(resolved.prefill_decode_args, "--max-model-len")
        length = given or config["max_position_embeddings"]
        assert kv_bytes(config) * int(length) < cache_bytes
