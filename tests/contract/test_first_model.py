"""The command line takes each command of docs/guide/first-model.md, for models of those shapes."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.waiting import free_port
from triptych_cli.app import app
from triptych_cli.commands import lifecycle
from triptych_cli.options import SystemOptions
from triptych_cli.settings import CHECKOUT
from triptych_cli.system import machine
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.machine import resolve
from triptych_cli.system.preflight import option, preflight

PAGE = (CHECKOUT / "docs" / "guide" / "first-model.md").read_text()
COMMANDS = re.findall(r"^((?:\w+=\S+ )*\./triptych [^\n]+)$", PAGE, re.MULTILINE)
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
GIB = 1 << 30
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}, "num_key_value_heads": 2,
    "hidden_size": 2048, "num_hidden_layers": 36, "head_dim": 128, "max_position_embeddings": 128_000,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": QWEN,
    "Qwen/Qwen2.5-VL-7B-Instruct": {
        **QWEN, "hidden_size": 3584, "num_hidden_layers": 28, "num_key_value_heads": 4
    },
    "llava-hf/llava-1.5-7b-hf": {
        "architectures": ["LlavaForConditionalGeneration"], "vision_config": {}, "image_token_index": 32_000,
        "text_config": {**LLAMA, "max_position_embeddings": 4096},
    },
    "Qwen/Qwen2-Audio-7B-Instruct": {
        "architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": {},
        "text_config": {**LLAMA, "max_position_embeddings": 8192},
    },
}  # fmt: skip
"""The parts of the published configurations that decide what fits."""


def parsed(command: str, monkeypatch: pytest.MonkeyPatch) -> SystemOptions | None:
    """As the command line takes it; None for another command than `up`."""
    words = shlex.split(command, comments=True)
    arguments = words[words.index("./triptych") + 1 :]
    taken: list[SystemOptions] = []

    def up(options: SystemOptions, join: str | None) -> int:
        taken.append(options)
        return 0

    monkeypatch.setattr(lifecycle, "up", up)
    group = typer.main.get_command(app)
    if arguments[0] != "up":
        group.commands[arguments[0]].make_context(arguments[0], arguments[1:])  # type: ignore[attr-defined]
        return None
    assert group.main(arguments, standalone_mode=False) == 0
    return taken[0]


def kv_bytes(config: dict[str, Any], num_tokens: int) -> int:
    """Of a context, in 16 bits."""
    text = config.get("text_config", config)
    return int(
        2 * 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"] * num_tokens
    )


def test_the_page_has_commands_for_each_model_and_machine() -> None:
    assert len(COMMANDS) >= 12
    for name in CONFIGS:
        assert sum(f"--model {name}" in each for each in COMMANDS) >= 2, name
        assert f"`{name}`" in PAGE


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_taken_and_nothing_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = parsed(command, monkeypatch)
    if options is None or "…" in command:
        return
    stand_in = tmp_path / Path(options.model).name
    stand_in.mkdir()
    config = CONFIGS[options.model]
    (stand_in / "config.json").write_text(json.dumps(config))
    fields = {**vars(options), "model": str(stand_in), "port": free_port()}
    monkeypatch.setattr(machine, "visible_gpus", tuple)
    resolved = resolve(SystemOptions(**fields), RunLayout(tmp_path, tmp_path), deployment="default")
    preflight(resolved)
    if PAGE[: PAGE.index(command)].rpartition("\n## ")[2].startswith("A CPU"):
        space = re.search(rf"{KV_SPACE}=(\d+) ", command)
        text = config.get("text_config", config)
        length = option(resolved.prefill_decode_args, "--max-model-len") or text["max_position_embeddings"]
        assert kv_bytes(config, int(length)) < int(space[1] if space else 1) * GIB


def test_the_pages_figures_of_kv_caches_follow_from_the_configurations() -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith("| KV cache of a token"))
    shown = [int(each) << 10 for each in re.findall(r"(\d+) KiB", row)]
    assert shown == [kv_bytes(config, 1) for config in CONFIGS.values()]


@pytest.mark.parametrize("quoted", re.findall(r"^\| `(?:! )?(?:… )?([^`…]+?)(?: …)?`", PAGE, re.MULTILINE))
def test_a_message_of_the_page_is_in_the_source(quoted: str) -> None:
    """As it is written, with a placeholder where the page has figures."""
    sources = "".join(
        re.sub(r'"\s*\n\s*f?"', "", file.read_text())
        for folder in ("libs/cli", "libs/vllm_connector")
        for file in (CHECKOUT / folder).rglob("*.py")
    )
    pattern = re.escape(f" {quoted}").replace(r"\ N\ ", " .*? ")
    assert re.search(pattern.removeprefix(r"\ "), sources), quoted
