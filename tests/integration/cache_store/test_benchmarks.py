"""The benchmark of the handover runs, checks what arrives, and prints it in 3 forms. No times asserted."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

WAYS = {"message", "memcpy", "memcpy same", "store", "shm copy", "st tmpfs", "st disk"}


def run(*words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "triptych_cli", *words]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_bench_handover(tmp_path: Path) -> None:
    ended = run(
        "bench", "handover", "--json=report.json", "--plot=plot.svg",
        "--sizes", "0.0625", "1", "--pairs", "2", "--pairs-size=0.25", "--repeats=3",
        "--kept-size=1", "--kept-region-gib=0.01", "--kept-tmpfs-gib=0.01", "--kept-disk-gib=0.01",
        directory=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) == {"results", "ratios", "kept", "goals", "load_average", "large_pages"}
    rows = {(each["regime"], each["way"], each["size_mib"], each["num_pairs"]) for each in report["results"]}
    for size in (0.0625, 1):
        assert {way for regime, way, mib, _ in rows if (regime, mib) == ("recycled", size)} >= WAYS
    assert {way for _, way, _, num_pairs in rows if num_pairs == 2} >= {"store", "st disk"}
    assert {way for regime, way, _, _ in rows if regime == "kept"} >= WAYS - {"message", "memcpy same"}
    for each in report["results"]:
        assert 0 < each["tensor"]["p50"] <= each["read"]["p50"]
        assert each["read"]["p50"] <= each["read"]["p99"]
    for each in report["ratios"]:
        assert each["best"] > 0
    assert {each["way"] for each in report["kept"]} >= {"store", "shm copy", "st tmpfs", "st disk"}
    assert all(len(each["read_ms"]) >= 10 for each in report["kept"])
    svg = ET.fromstring((tmp_path / "plot.svg").read_text())
    assert len(svg.findall("./{http://www.w3.org/2000/svg}svg")) == 2
    assert len(svg.findall(".//{http://www.w3.org/2000/svg}polyline")) >= len(WAYS) + 4
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plot.svg", "report.json"]


def test_what_would_not_fit_is_refused(tmp_path: Path) -> None:
    ended = run("bench", "handover", "--kept-disk-gib=1000000", directory=tmp_path)
    assert ended.returncode == 2
    assert "do not fit" in ended.stderr
    assert list(tmp_path.iterdir()) == []
