"""tests/gpu/handover runs on a GPU in host memory, so that on a real one its tests are what fails."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_tests_of_the_handover_pass_on_a_fake_gpu(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu/handover", "--fake", f"--figures={figures}", "-q"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "6 passed" in ended.stdout, ended.stdout
    assert "[slab]" in figures.read_text()
