"""`demo` as a newcomer runs it: right digits, every stage, and nothing left behind, however it ends."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.real.system import MODEL
from triptych_cli.supervisor.process import shared_memory_of

LIMIT_S = 400
SAMPLES = Path(__file__).parents[3] / "models" / "digits-vl" / "samples" / "samples.json"
COMMAND = [sys.executable, "-m", "triptych_cli", "demo", f"--model={MODEL}", "--images=2"]
RUN_DIR = re.compile(r"in (\S*triptych-demo-\w+)")

pytestmark = pytest.mark.skipif(not SAMPLES.exists(), reason="models/digits-vl/samples is not there")


def left_of(run_dir: str) -> list[str]:
    """Processes and files of one demo."""
    left = [str(path) for path in Path(run_dir).parent.glob(f"{Path(run_dir).name}*")]
    for process in psutil.process_iter():
        try:
            if process.environ().get("TRIPTYCH_RUN_DIR") == run_dir:
                left.append(f"{process.pid} {process.name()}")
        except psutil.Error:
            continue
    return left


@pytest.fixture(autouse=True)
def no_shared_memory_is_left() -> Iterator[None]:
    """Names that appear in /dev/shm during the test, and that no process has mapped after it."""
    before = set(os.listdir("/dev/shm"))
    yield
    in_use = {path.name for path in shared_memory_of(list(psutil.process_iter()))}
    others = {name for name in os.listdir("/dev/shm") if name.startswith("triptych-")}  # run directories
    assert set(os.listdir("/dev/shm")) - before - in_use - others == set()


@pytest.fixture
def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("TRIPTYCH_RUN")}


def test_it_reads_the_digits_shows_every_stage_and_leaves_nothing(environment: dict[str, str]) -> None:
    done = subprocess.run(
        COMMAND, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, again = done.stdout.split("The first picture again")
    for stage in (
        "chat digits-vl",
        "encoder.preprocess",
        "encoder.encode",
        "encoder.seal",
        "prefill.inject",
    ):
        assert stage in first
    assert "llm_request" in first
    assert "✓" in again
    assert "encoder.encode" not in again
    match = RUN_DIR.search(done.stdout)
    assert match is not None
    assert left_of(match[1]) == []


def test_an_interrupt_while_it_starts_leaves_nothing(environment: dict[str, str]) -> None:
    with subprocess.Popen(
        COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        seen = ""
        while "cache_store-0" not in seen:  # from here on the engines start
            line = process.stdout.readline()
            assert line, seen
            seen += line
        process.send_signal(signal.SIGINT)
        seen += process.stdout.read()
        assert process.wait(LIMIT_S) == 130, seen
    match = RUN_DIR.search(seen)
    assert match is not None
    assert left_of(match[1]) == []


def test_a_failed_start_shows_why_and_leaves_nothing(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*COMMAND, "--prefill-decode-args=--no-such-option"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "unrecognized arguments: --no-such-option" in done.stderr
    assert "prefill_decode-0 exited with code" in done.stderr
    match = RUN_DIR.search(done.stdout)
    assert match is not None
    assert left_of(match[1]) == []
