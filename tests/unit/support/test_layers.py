"""What `./triptych test` hands to pytest."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.layers import run_tests


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Each run of pytest: its arguments after the options of the checkout. All end well."""
    seen: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        seen.append(command[5:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_layers_without_processes_come_first_and_chaos_last_several_files_at_a_time(
    runs: list[list[str]],
) -> None:
    assert run_tests(None, []) == 0
    layers = [[Path(word).name for word in run if word.startswith("/")] for run in runs]
    assert layers == [["property", "integration", "unit", "contract"], ["engine", "gpu"], ["chaos"]]
    assert [[each for each in run if each.startswith("-n")] for run in runs] == [
        ["-n4"], [], ["-n4"],
    ]  # fmt: skip


def test_a_failed_run_ends_the_others_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    num_runs = 0

    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        nonlocal num_runs
        num_runs += 1
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", fail)
    assert run_tests(None, ["-x"]) == 1
    assert num_runs == 1
    assert run_tests(None, []) == 1
    assert num_runs == 4


def test_long_tests_run_when_asked_for(runs: list[list[str]]) -> None:
    run_tests("engine", [])
    run_tests("engine", ["--long"])
    assert runs[0][-2:] == ["-m", "not long"]
    assert "-m" not in runs[1]
    assert "--long" not in runs[1]


def test_named_files_run_whole(runs: list[list[str]]) -> None:
    assert run_tests(__file__, ["-k", "x"]) == 0
    assert runs == [[__file__, "-k", "x"]]


def test_the_worst_end_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([0, 1, 0, 5, 5, 0, 5, 5, 5])
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, next(ends))
    )
    assert run_tests(None, []) == 1
    assert run_tests(None, ["-k", "only_in_chaos"]) == 0
    assert run_tests(None, ["-k", "nowhere"]) == 5
