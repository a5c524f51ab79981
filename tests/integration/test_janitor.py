"""A run of pytest that is killed leaves no process and no shared memory, however they were started."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import janitor
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
KINDS = ("redis-server", "triptych_cache_store", "forkserver", "resource_tracker", "a daemon")
"""Words of the command lines of what `TEST` starts."""
TEST = """
import multiprocessing, os, signal, sys, tempfile
from pathlib import Path
from tests.conftest import EmbeddedRedis
from tests.support.stores import StoreProcess

def test_it():
    EmbeddedRedis().start()
    store = StoreProcess(Path(tempfile.mkdtemp(prefix="triptych-test-", dir="/dev/shm")))
    store.start()
    multiprocessing.get_context("forkserver").Process(target=signal.pause, daemon=True).start()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, ["a daemon", "-c", "import signal; signal.pause()"])
        os._exit(0)
    Path("new").write_text(f"{os.environ['PYTEST_OWNER']} {store.run_dir}")
    os.rename("new", "started")
    signal.pause()
"""


def start(folder: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    """Python, which belongs to no run."""
    environment = {name: value for name, value in os.environ.items() if name != janitor.OWNER}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder, env={**environment, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE if arguments[0] == "-c" else None,
    )  # fmt: skip


def start_pytest(folder: Path, *options: str) -> "subprocess.Popen[bytes]":
    """Run `TEST` as a run of its own."""
    (folder / "test_it.py").write_text(TEST)
    settings = (f"-c{ROOT / 'pyproject.toml'}", f"--rootdir={ROOT}", "-ptests.conftest", "-pno:cacheprovider")
    return start(folder, "-m", "pytest", *settings, *options, "test_it.py")


def command_lines(owner: str) -> list[str]:
    lines = []
    for pid in janitor.processes_of(owner):
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(" ".join(psutil.Process(pid).cmdline()))
    return lines


@pytest.mark.parametrize("is_swept", [False, True], ids=["by its janitor", "by the next run"])
def test_nothing_is_left_of_a_killed_run(
    is_swept: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = start_pytest(tmp_path, *(["-n1"] if is_swept else []))
    request.addfinalizer(run.kill)
    started = tmp_path / "started"
    wait_until(lambda: started.exists() or run.poll() is not None, LIMIT_S, "everything is started")
    owner, run_dir = started.read_text().split()
    wait_until(
        lambda: all(kind in "\n".join(command_lines(owner)) for kind in KINDS),
        LIMIT_S, lambda: f"not all of {KINDS} are known: {command_lines(owner)}",
    )  # fmt: skip
    assert Path(run_dir).exists()
    if is_swept:
        (watching,) = [each for each in psutil.Process(run.pid).children() if owner in each.cmdline()]
        watching.kill()
    run.kill()
    run.wait()
    if is_swept:
        assert start_pytest(tmp_path, "--collect-only").wait(LIMIT_S) == 0
    else:
        wait_until(lambda: not janitor.notes_of(owner).exists(), LIMIT_S, "the janitor is done")
    assert not command_lines(owner)
    assert not Path(run_dir).exists()
    assert not janitor.notes_of(owner).exists()


def test_a_run_in_which_nothing_moves_is_ended(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    hang = "import signal; from tests.support import janitor; janitor.try_start(0.01); signal.pause()"
    run = start(tmp_path, "-c", hang)
    request.addfinalizer(run.kill)
    _, said = run.communicate(timeout=LIMIT_S)
    assert run.returncode == -signal.SIGINT
    assert b"no test has ended for 0.01 s" in said
