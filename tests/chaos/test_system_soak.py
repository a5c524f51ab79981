"""Half a minute of the system's soak: every answer right, or an error that is documented; nothing is left."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


def test_nothing_is_wrong_hangs_or_stays(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    command = [sys.executable, "-m", "triptych_cli", "soak", "system", "--minutes=0.4", "--seed=5"]
    ended = subprocess.run(
        [*command, f"--json={report_path}"], capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-6000:]
    report = json.loads(report_path.read_text())
    assert report["faults"] == []
    assert report["left_over"] == {}
    assert report["outcomes"]["right"] > 0
    assert report["num_faults"] >= 3
    assert {"start", "end"} == set(report["memory_bytes"])
