"""What `doctor` reports about GPUs and disks, from what it finds."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from triptych_cli.commands import doctor
from triptych_cli.commands.doctor import Level


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with two GPUs, an environment that was made for them, and NVIDIA's bindings."""
    monkeypatch.setattr(doctor, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(doctor, "_has_distribution", lambda name: name == "vllm")
    monkeypatch.setattr(doctor, "has_bindings", lambda: True)
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: f"13.1 of {name}")
    return monkeypatch


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
    full = {doctor.CHECKOUT: doctor.GIB * 9, tmp_path: 0}
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=full[path]))
    finding = doctor.check_disk()
    assert finding.level is Level.BAD
    assert f"0.0 GiB in {tmp_path};" in finding.text
