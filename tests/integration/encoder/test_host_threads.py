"""An encoder's priority, in processes of their own: it cannot be raised again. And where its threads run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from triptych_encoder.host_threads import NICE

LOWER = """
import os, pathlib, threading
from triptych_encoder.host_threads import lower_priority
lower_priority()
started = []
thread = threading.Thread(target=lambda: started.append(os.getpriority(os.PRIO_PROCESS, 0)))
thread.start()
thread.join()
autogroup = pathlib.Path("/proc/self/autogroup")
print(os.getpriority(os.PRIO_PROCESS, 0), *started)
print(autogroup.read_text() if autogroup.exists() else "")
"""
STAY = """
import json, os, sys, threading
from triptych_encoder.host_threads import stay_off
go, places = threading.Event(), []
def note():
    go.wait()
    places.append(sorted(os.sched_getaffinity(0)))
before = threading.Thread(target=note)
before.start()
stay_off(json.loads(sys.argv[1]))
after = threading.Thread(target=note)
after.start()
go.set()
before.join()
after.join()
print(json.dumps([sorted(os.sched_getaffinity(0)), *places]))
"""
has_autogroups = Path("/proc/self/autogroup").exists()


def lowered(*, new_session: bool) -> tuple[int, int, int | None]:
    """Of the process, of a thread that it starts then, and of its session; none: it has no group of its own,
    which is so in the first session of a container, or if this Linux has no autogroups or they are off.
    """
    done = subprocess.run(
        [sys.executable, "-c", LOWER],
        start_new_session=new_session,
        capture_output=True,
        check=True,
        text=True,
    )
    first, _, autogroup = done.stdout.partition("\n")
    process, thread = first.split()
    session = re.search(r"nice (-?\d+)", autogroup)
    return int(process), int(thread), int(session[1]) if session else None


def test_the_process_and_what_it_starts_are_lowered() -> None:
    assert lowered(new_session=True)[:2] == (NICE, NICE)


@pytest.mark.skipif(not has_autogroups, reason="this Linux has no autogroups")
def test_its_own_session_is_lowered_and_no_other() -> None:
    before = Path("/proc/self/autogroup").read_text()
    assert lowered(new_session=True)[2] in (NICE, None)
    lowered(new_session=False)
    assert Path("/proc/self/autogroup").read_text() == before


def placed(others: list[int]) -> list[list[int]]:
    """Cores of the process's first thread, of one that it had started, and of one that it starts then."""
    done = subprocess.run([sys.executable, "-c", STAY, json.dumps(others)], capture_output=True, check=True)
    cores: list[list[int]] = json.loads(done.stdout)
    return cores


def test_its_threads_run_on_no_core_of_another_engine() -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    assert placed([*others, max(first, *others, 0) + 1]) == [[first]] * 3


def test_where_no_core_is_left_threads_stay() -> None:
    usable = sorted(os.sched_getaffinity(0))
    assert placed(usable) == [usable] * 3
