"""Thirty seconds of the cache_store's soak: kill -9 of producers, consumers and the store itself."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak_store.py"


@pytest.mark.chaos
@pytest.mark.slow
def test_every_tensor_is_right_and_nothing_is_left_behind() -> None:
    command = [sys.executable, str(SOAK), "--minutes", "0.5", "--seed", "11"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for line in ("leaked blocks: 0", "orphaned pins: 0", "reservations and watches left: 0"):
        assert line in finished.stdout
