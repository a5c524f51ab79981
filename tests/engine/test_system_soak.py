"""Two minutes of the soak on real engines: what a monolithic vLLM answers, or an error; nothing is left."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.slow, pytest.mark.long]

LIMIT_S = 1200


def test_nothing_is_wrong_hangs_or_stays(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    command = [sys.executable, "-m", "triptych_cli", "soak", "system", "--engine=real", "--minutes=2"]
    ended = subprocess.run(
        [*command, "--seed=5", f"--json={report_path}"],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr[-6000:]
    report = json.loads(report_path.read_text())
    print(ended.stdout)
    assert report["faults"] == []
    assert report["left_over"] == {}
    assert report["outcomes"]["right"] > 0
    assert report["num_faults"] >= 10
    assert any(what.startswith(("kill encoder", "kill prefill_decode")) for what in report["faults_injected"])
