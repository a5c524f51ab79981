"""A process that is forked from a host's imports is what a spawned one would be."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.waiting import until
from triptych_vllm_connector.host import engine_fork

HELPER = """
import atexit, json, os
from pathlib import Path

IMPORTED_BY = os.getpid()

def report(path):
    atexit.register(lambda: Path(path + ".exit").write_text("done"))
    found = {"imported_by": IMPORTED_BY, "late": os.environ.get("LATE"), "gone": os.environ.get("GONE"),
             "nice": os.getpriority(os.PRIO_PROCESS, 0), "pid": os.getpid()}
    Path(path).write_text(json.dumps(found))

def wait():
    import signal
    signal.pause()
"""
HOST = """
import json, os, sys
import helper
from multiprocessing import forkserver
from triptych_vllm_connector.host import engine_fork

os.environ["GONE"] = "1"
engine_fork._start_server()
os.environ["LATE"] = "1"  # as vLLM sets variables just before it starts the engine
del os.environ["GONE"]
os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + 1)
process = engine_fork._Context().Process(target=helper.report, args=(sys.argv[1],))
process.start()
process.join()
left = engine_fork._Context().Process(target=helper.wait, daemon=False)
left.start()
print(json.dumps({"pid": os.getpid(), "server": forkserver._forkserver._forkserver_pid, "left": left.pid,
                  "exit": process.exitcode, "nice": os.getpriority(os.PRIO_PROCESS, 0)}), flush=True)
sys.stdin.read()
left.terminate()
left.join()
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "host.py").write_text(HOST)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "host.py"), str(tmp_path / "report")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        yield process
        process.kill()


def found_by(host: "subprocess.Popen[str]") -> dict[str, int]:
    assert host.stdout is not None
    return dict(json.loads(host.stdout.readline()))


async def gone(*pids: int) -> None:
    await until(
        lambda: all(
            not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids
        )
    )


async def test_it_has_the_hosts_imports_and_its_present_environment_and_priority(
    host: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    told, report = found_by(host), json.loads((tmp_path / "report").read_text())
    assert report["imported_by"] == told["pid"], "nothing was imported again"
    assert report["pid"] not in (told["pid"], told["server"])
    assert (report["late"], report["gone"]) == ("1", None)
    assert (report["nice"], told["exit"]) == (told["nice"], 0)
    assert (tmp_path / "report.exit").read_text() == "done", "its exit functions have run"
    host.communicate("")
    assert host.returncode == 0
    await gone(told["server"], told["left"])


def test_on_a_gpu_nothing_is_imported_and_no_fork_server_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork does not take CUDA along."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engine_fork, "MODULES", ("triptych_not_there",))
    assert not engine_fork.fork_engine()


async def test_the_fork_server_ends_with_a_killed_host(host: "subprocess.Popen[str]") -> None:
    told = found_by(host)
    host.kill()
    host.wait()
    await gone(told["server"])
    psutil.Process(told["left"]).kill()  # EngineCore has the kernel end it: `process_exit`
