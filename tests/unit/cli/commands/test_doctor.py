"""What `doctor` reports about GPUs and disks, from what it finds."""

import importlib.metadata
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from triptych_cli.commands import doctor
from triptych_cli.commands.doctor import Level
from triptych_cli.settings import CHECKOUT
from triptych_vllm_connector.versions import SUPPORTED_VLLM


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with two GPUs, an environment that was made for them, and NVIDIA's bindings."""
    monkeypatch.setattr(doctor, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(doctor, "_has_distribution", lambda name: name == "vllm")
    monkeypatch.setattr(doctor, "has_bindings", lambda: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"13.1 of {name}")
    smi(monkeypatch, "0, 580.65.06, Default\n1, 580.65.06, Default\n")
    return monkeypatch


def smi(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """Let nvidia-smi answer this."""
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=answer))


def test_a_gpu_with_nvidias_bindings_is_good(found: pytest.MonkeyPatch) -> None:
    finding = doctor.check_gpu()
    assert finding.level is Level.GOOD
    assert finding.text == "2 NVIDIA GPUs, cuda-bindings 13.1 of cuda-bindings"


def test_a_gpu_without_them_is_a_note_with_its_remedy(found: pytest.MonkeyPatch) -> None:
    found.setattr(doctor, "has_bindings", lambda: False)
    finding = doctor.check_gpu()
    assert finding.level is Level.NOTE
    assert "without cuda-bindings" in finding.text
    assert "pip install 'cuda-bindings>=12.9.1'" in finding.text


@pytest.mark.parametrize(
    ("answer", "level", "text"),
    [
        ("0, 570.124.06, Default\n", Level.BAD, "driver 570.124.06 is older than 580"),
        ("0, [N/A], Default\n", Level.NOTE, "driver [N/A]: CUDA 13 needs 580 or newer"),
        (
            "0, 580.1, Default\n1, 590.2, Exclusive_Process\n",
            Level.NOTE,
            "GPU 1 is in compute mode Exclusive_Process",
        ),
    ],
)
@pytest.mark.parametrize("has_bindings", [True, False])
def test_a_driver_that_is_too_old_is_an_error_and_a_mode_that_keeps_engines_apart_a_note(
    found: pytest.MonkeyPatch, answer: str, level: Level, text: str, has_bindings: bool
) -> None:
    found.setattr(doctor, "has_bindings", lambda: has_bindings)
    smi(found, answer)
    finding = doctor.check_gpu()
    assert finding.level is level
    assert text in finding.text


def test_without_a_gpu_they_are_not_needed(found: pytest.MonkeyPatch) -> None:
    found.setattr(doctor, "visible_gpus", list)
    found.setattr(doctor, "_has_distribution", lambda name: False)
    found.setattr(doctor, "has_bindings", lambda: False)
    finding = doctor.check_gpu()
    assert finding.level is Level.GOOD
    assert finding.text == "none; engines run on the CPU"


def test_the_disk_of_the_state_directory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs and traces are there, and not in the checkout; it need not be made yet."""
    monkeypatch.setenv("TRIPTYCH_STATE_DIR", str(tmp_path / "not" / "made"))
    full = {CHECKOUT: doctor.GIB * 9, tmp_path: 0}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=full[path]))
    finding = doctor.check_disk()
    assert finding.level is Level.BAD
    assert f"0.0 GiB in {tmp_path};" in finding.text


@pytest.mark.parametrize(
    ("installed", "level"),
    [("0.32.0", Level.GOOD), ("0.33.0", Level.GOOD), ("0.33.0+cu130", Level.GOOD), ("0.31.9", Level.BAD)],
)
def test_the_installed_vllm_and_the_supported_ones_are_named(
    installed: str, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supported ones are the engines' own list; the import of vLLM is played."""
    run, commands = subprocess.run, []

    def run_all_but_vllm(command: list[str], **options: Any) -> Any:
        commands.append(command[-1])
        if "import vllm" in command[-1]:
            return SimpleNamespace(returncode=0, stdout="2.11.0\n")
        return run(command, **options)

    monkeypatch.setattr(doctor, "_has_distribution", lambda name: name == "vllm")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    monkeypatch.setattr(subprocess, "run", run_all_but_vllm)
    finding = doctor.check_vllm()
    assert finding.level is level
    assert f"vllm {installed} (supported: {', '.join(SUPPORTED_VLLM)})" in finding.text
    assert any("import vllm" in each for each in commands) is (level is Level.GOOD)
