"""Which part of a GPU the store's slab is, from what nvidia-smi reports."""

import subprocess
from typing import Any

import pytest

from triptych_cli.system import machine
from triptych_cli.system.machine import LaunchError, gpu_bytes, slab_share

GIB = 1 << 30


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What nvidia-smi answers."""
    answer: dict[str, Any] = {"stdout": "24576\n", "returncode": 0}

    def run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        answer["asked"] = command
        if "error" in answer:
            raise answer["error"]
        return subprocess.CompletedProcess(command, answer["returncode"], answer["stdout"], "")

    monkeypatch.setattr(machine.subprocess, "run", run)
    return answer


def test_the_first_gpu_is_asked(smi: dict[str, Any]) -> None:
    assert slab_share(6 * GIB, ("3", "0")) == 0.25
    assert "--id=3" in smi["asked"]


def test_without_a_slab_or_a_gpu_nvidia_smi_is_not_run(smi: dict[str, Any]) -> None:
    assert slab_share(0, ("0",)) == slab_share(6 * GIB, ()) == 0.0
    assert "asked" not in smi


def test_more_than_there_is(smi: dict[str, Any]) -> None:
    with pytest.raises(LaunchError, match="more than GPU 0 has"):
        slab_share(24 * GIB, ("0",))


@pytest.mark.parametrize(
    "changes",
    [{"stdout": "[N/A]"}, {"returncode": 9}, {"error": FileNotFoundError()},
     {"error": subprocess.TimeoutExpired("nvidia-smi", 20)}],
)  # fmt: skip
def test_what_nvidia_smi_does_not_report_ends_the_start(smi: dict[str, Any], changes: dict[str, Any]) -> None:
    smi.update(changes)
    assert gpu_bytes("0") is None
    with pytest.raises(LaunchError, match="does not report"):
        slab_share(GIB, ("0",))
