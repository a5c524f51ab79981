"""What `./triptych bench` hands to the scripts of benchmarks/."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from triptych_cli.app import app


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Each run of a script: its name, and what it is given."""
    seen: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        seen.append([Path(command[1]).name, *command[2:]])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return seen


@pytest.mark.parametrize(
    "words", [["--help"], ["-h"], ["--scale", "s", "--help"], ["--json=there.json", "a", "-x"], []], ids=str
)
def test_what_stands_behind_a_name_is_the_scripts(words: list[str], runs: list[list[str]]) -> None:
    done = CliRunner().invoke(app, ["bench", "compare", *words])
    assert (done.exit_code, runs) == (0, [["compare.py", *words]]), done.output
