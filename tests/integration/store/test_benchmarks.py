"""The benchmark of the handover runs, checks what arrives, and tells it in three forms. No times asserted."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

WAYS = {"message", "memcpy", "store", "shm copy", "st tmpfs", "st disk"}


def run(*words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "triptych_cli", *words]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_bench_handover(tmp_path: Path) -> None:
    ended = run(
        "bench", "handover", "--json=report.json", "--plot=plot.svg",
        "--sizes", "0.0625", "1", "--pairs", "2", "--pairs-size=0.25", "--repeats=3",
        directory=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) == {"results", "goals", "load_average", "large_pages"}
    single = {(each["way"], each["size_mib"]): each for each in report["results"] if each["num_pairs"] == 1}
    for size in (0.0625, 1):
        assert {way for way, mib in single if mib == size} >= WAYS
        assert single["store", size]["of_memcpy"] > 0
    assert {each["way"] for each in report["results"] if each["num_pairs"] == 2} >= {"store", "st disk"}
    for each in report["results"]:
        assert 0 < each["tensor_ms"] <= each["read_ms"]
    svg = ET.fromstring((tmp_path / "plot.svg").read_text())
    assert len(svg.findall(".//{http://www.w3.org/2000/svg}polyline")) >= len(WAYS)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plot.svg", "report.json"]


def test_soak_store(tmp_path: Path) -> None:
    assert run("soak", "nothing", directory=tmp_path).returncode == 2
    ended = run("soak", "store", "--minutes=0.05", "--seed=3", directory=tmp_path)
    # In three seconds of a busy machine perhaps nothing is handed over; nothing else may be wrong.
    faults = [line for line in ended.stdout.splitlines() if line.startswith("FAULT")]
    assert [fault for fault in faults if "nothing was handed over" not in fault] == [], ended.stdout
    assert "tensors written" in ended.stdout
