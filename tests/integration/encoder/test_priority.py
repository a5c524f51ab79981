"""An encoder's priority, in processes of their own: it cannot be raised again. And where its threads run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from triptych_common.cores.plan import CORES_PER_SPARE_CORE
from triptych_encoder.priority import NICE

LOWER = """
import os, pathlib, threading
from triptych_encoder.priority import lower_priority
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
from triptych_encoder.priority import stay_off_engines
go, places = threading.Event(), []
def note():
    go.wait()
    places.append(sorted(os.sched_getaffinity(0)))
before = threading.Thread(target=note)
before.start()
stay_off_engines(json.loads(sys.argv[1]))
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


def placed(own: list[int]) -> list[list[int]]:
    """Cores of the process's first thread, of one that it had started, and of one that it starts then."""
    done = subprocess.run([sys.executable, "-c", STAY, json.dumps(own)], capture_output=True, check=True)
    cores: list[list[int]] = json.loads(done.stdout)
    return cores


def test_its_threads_run_on_no_core_of_another_engine() -> None:
    usable = sorted(os.sched_getaffinity(0))
    spare = usable[len(usable) - len(usable) // CORES_PER_SPARE_CORE :]
    assert placed(usable[:1]) == [sorted({usable[0], *spare})] * 3


def test_cores_that_it_may_not_use_are_left_alone() -> None:
    usable = sorted(os.sched_getaffinity(0))
    beyond = usable[-1] + 1
    places = placed([beyond])
    assert len(usable) >= CORES_PER_SPARE_CORE or places == [usable] * 3
