"""The system's soak with instances of every role side by side."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

ROLES = {"prefill_decode", "prefill", "decode", "encode_prefill", "encode_prefill_decode"}


def soak(folder: Path, minutes: float, seed: int, limit_s: float) -> dict[str, Any]:
    """Its report. Nothing was wrong, hung or stayed, and instances of each role had requests."""
    path = folder / "report.json"
    command = [sys.executable, "-m", "triptych_cli", "soak", "system", "--topology=all"]
    ended = subprocess.run(
        [*command, f"--minutes={minutes}", f"--seed={seed}", f"--json={path}"],
        capture_output=True, text=True, timeout=limit_s, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr[-6000:]
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["faults"] == []
    assert report["left_over"] == {}
    assert report["outcomes"]["right"] > 0
    assert roles_with(report, "requests") == ROLES
    assert roles_with(report, "encoded_itself") == {"encode_prefill", "encode_prefill_decode"}
    return report


def roles_with(report: dict[str, Any], what: str) -> set[str]:
    return {role for role, share in report["shares"].items() if share[what]}


def test_a_few_faults(tmp_path: Path) -> None:
    report = soak(tmp_path, minutes=0.1, seed=5, limit_s=200)
    assert report["num_faults"] >= 3


@pytest.mark.long
def test_every_role_is_killed(tmp_path: Path) -> None:
    report = soak(tmp_path, minutes=5, seed=41, limit_s=600)
    assert {f"kill {role}" for role in ROLES} <= report["faults_injected"].keys(), report["faults_injected"]
    assert roles_with(report, "from_held_prefixes") == {"decode"}
