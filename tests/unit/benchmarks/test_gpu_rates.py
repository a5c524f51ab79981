"""The GPU benchmark's arithmetic, and its run on a fake GPU. No rates asserted."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from gpu_rates.measuring import Compared, Passage, figure, report, table


def test_ratios_are_to_the_copy_that_goes_the_same_way() -> None:
    rates = {"device to host": 20.0, "host to device": 25.0, "device copy": 2000.0}
    passage = Passage(write_s=1e-3, told_s=2e-4, open_s=8e-4)
    pinned = figure("pinned_shm", 16, [passage], Compared("device to host", "host to device"), rates)
    assert pinned.write_gb_s == pytest.approx(16.777216)
    assert pinned.out_ratio == pytest.approx(16.777216 / 20)
    assert pinned.in_ratio == pytest.approx(20.97152 / 25)
    ipc = figure("cuda_ipc", 16, [Passage(8.4e-6, 2e-4, 1e-5)], Compared("device copy", None), rates)
    assert ipc.out_ratio == pytest.approx(0.9986, abs=1e-3)
    result = report({"gpu": "fake"}, [pinned, ipc])
    assert result["cuda_ipc_reaches_target"]
    slow = figure("cuda_ipc", 1, [Passage(1.0, 0.0, 1.0)], Compared("device copy", None), rates)
    assert not report({}, [ipc, slow])["cuda_ipc_reaches_target"]
    assert not report({}, [pinned])["cuda_ipc_reaches_target"]
    lines = table([pinned, ipc]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "none needed" not in lines[2]
    assert "none needed" in lines[3]
