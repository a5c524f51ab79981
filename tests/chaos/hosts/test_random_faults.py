"""A thousand random faults of processes and of the network, under load: nothing is wrong, hangs or stays."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts.namespaces import require_namespaces

ROOT = Path(__file__).resolve().parents[3]
NUM_FAULTS = 1000
LIMIT_S = 3 * 3600

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(LIMIT_S)]


def test_nothing_is_wrong_hangs_or_stays(tmp_path: Path) -> None:
    require_namespaces()
    report_path = tmp_path / "report.json"
    command = [
        sys.executable, str(ROOT / "benchmarks" / "soak_system.py"), "--engine=hosts", "--minutes=1",
        f"--faults={NUM_FAULTS}", "--seed=16", f"--json={report_path}",
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-6000:]
    report = json.loads(report_path.read_text())
    assert report["faults"] == []
    assert report["left_over"] == {}
    assert report["outcomes"]["right"] > 0
    assert report["num_faults"] >= NUM_FAULTS
