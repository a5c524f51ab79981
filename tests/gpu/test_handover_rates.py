"""The benchmark of the handover runs here, and what arrives is what was sent. No rates asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cuda.gpu import why_no_gpu

if (reason := why_no_gpu()) is not None:
    pytest.skip(reason, allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]


def test_the_benchmark_of_the_handover(tmp_path: Path) -> None:
    script, report = ROOT / "benchmarks" / "gpu_handover.py", tmp_path / "report.json"
    ended = subprocess.run(
        [sys.executable, str(script), "--sizes", "1", "64", "128", "--repeats=3", f"--json={report}"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    reported = json.loads(report.read_text())
    figures = reported["figures"]
    ways = {(each["way"], each["mib"]) for each in figures}
    assert ways == {(way, mib) for way in ("cuda_ipc", "pinned_shm") for mib in (1, 64, 128)}
    assert all(each["write_gb_s"] > 0 for each in figures)
    judged = {(each["way"], each["direction"]) for each in reported["fits"]}
    assert judged == {("cuda_ipc", "write"), ("pinned_shm", "write"), ("pinned_shm", "open")}
