"""Logs that are rotated while a service runs, and `./triptych logs` of them."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.cli.test_supervisor import Watched, fake, layout
from tests.support.waiting import wait_until
from triptych_cli.settings import CliSettings
from triptych_cli.supervisor.rotating_log import RotatingLog, older_log
from triptych_cli.supervisor.supervisor import run_directory
from triptych_cli.system.layout import RunLayout, lasting_layout

MAX_BYTES = 400
LIMIT_S = 60

__all__ = ["layout"]  # a fixture


@pytest.fixture
def of_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    monkeypatch.setenv("TRIPTYCH_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TRIPTYCH_STATE_DIR", str(tmp_path / "state"))
    made = lasting_layout(CliSettings())
    made.logs_dir.mkdir(parents=True)
    return made


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "triptych_cli", "logs", "one", *options]


def line(number: int) -> bytes:
    return b"line %d\n" % number


def test_lines_before_a_rotation_are_shown(of_up: RunLayout) -> None:
    log = RotatingLog(of_up.log_file("one"), MAX_BYTES)
    for number in range(30):
        log.write(line(number))
    log.close()
    assert len(log.file.read_bytes().splitlines()) < 15
    assert older_log(log.file).exists()
    shown = subprocess.run(command("-n", "15"), capture_output=True, check=True, env=dict(os.environ))
    assert shown.stdout == b"".join(map(line, range(15, 30)))


def test_following_goes_on_behind_a_rotation(of_up: RunLayout, tmp_path: Path) -> None:
    log, shown = RotatingLog(of_up.log_file("one"), MAX_BYTES), tmp_path / "shown"
    log.write(line(0))
    with (
        shown.open("wb") as out,
        subprocess.Popen(command("-f", "-n", "5"), stdout=out, start_new_session=True) as following,
    ):
        try:
            for number in range(1, 40):
                wait_until(
                    lambda number=number: shown.read_bytes().endswith(line(number - 1)),
                    LIMIT_S,
                    f"line {number - 1} is shown",
                )
                log.write(line(number))
        finally:
            os.killpg(following.pid, signal.SIGINT)  # Ctrl-C
    log.close()
    assert older_log(log.file, 2).exists()


async def test_logs_are_rotated_while_a_service_runs(layout: RunLayout) -> None:
    """Each file is bounded, and nothing is lost but what the oldest had."""
    num_lines = 20_000
    layout = replace(layout, log_max_bytes=40_000)
    with run_directory(layout):
        watched = Watched(layout, fake("one", "--num-lines", str(num_lines)))
        async with watched.supervisor.running():
            pass
    names = ["one.log.3", "one.log.2", "one.log.1", "one.log"]
    assert sorted(file.name for file in layout.logs_dir.iterdir()) == sorted(names)
    files = [(layout.logs_dir / name).read_text() for name in names]
    assert sum(map(len, files)) <= 40_000 + 4 * (64 << 10)  # what the pipe gives at once
    kept = "".join(files).splitlines()
    assert kept == [f"line {number}" for number in range(num_lines - len(kept), num_lines)]
